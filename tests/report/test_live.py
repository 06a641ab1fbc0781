"""An open page follows its run, whatever becomes of the server and of single answers."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import thorough_but
from report.browser import Tab, needs_browser
from report.folders import asked, done, picture, write_run
from report.test_use import IS_OPEN, count, text

from hyimg_cli.report.run_page import RunPage

pytestmark = needs_browser
CUT = b"HTTP/1.1 200 OK\r\ncontent-type: text/javascript\r\ncontent-length: 5000\r\n\r\nhyimgRep"
LOGIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 8\r\n\r\n<p>login"
HALF = b"HTTP/1.1 200 OK\r\ncontent-type: text/javascript\r\ncontent-length: 12\r\n\r\nhyimgReport."
BAD = b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\n<p>"
FAULTS = {"502": BAD, "cut off": CUT, "a login page": LOGIN, "half a file": HALF, "no answer": b""}


class Site:
    """A folder over HTTP. Paths that contain one of `faulty` are answered by its bytes."""

    def __init__(self, folder: Path) -> None:
        site, self.faulty = self, dict[str, bytes]()
        self.port, self.asked = 0, list[str]()

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given, directory=str(folder))

            def do_GET(self) -> None:
                site.asked.append(self.path)
                for part, answer in site.faulty.items():
                    if part in self.path:
                        self.close_connection = True
                        self.wfile.write(answer)
                        return
                super().do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self._handler = Handler

    def start(self) -> None:
        """Listen, always on the same port."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A running run with one of three jobs done."""
    out = tmp_path / "out"
    for name in "abc":
        picture(out / f"outputs/{name}.png", ord(name))
    jobs = [asked(name, images=[], prompt=name) for name in "abc"]
    RunPage(write_run(out, [done("a")], jobs)).refresh(is_running=True)
    return out


@pytest.fixture
def site(run: Path) -> Iterator[Site]:
    made = Site(run)
    made.start()
    yield made
    made.stop()


def open_page(tab: Tab, site: Site) -> None:
    tab.open(f"http://127.0.0.1:{site.port}/report.html")
    tab.wait("document.querySelector('#verdict').textContent !== '…'")


def end(run: Path, *names: str, is_running: bool = False) -> None:
    with open(run / "results.jsonl", "a") as journal:
        journal.writelines(json.dumps(done(name)) + "\n" for name in names)
    RunPage(run).refresh(is_running=is_running)


def jobs_shown(tab: Tab, number: int) -> None:
    tab.wait(f"document.querySelectorAll('.job').length === {number}", 30)


@pytest.mark.parametrize("fault", thorough_but(("502", "cut off", "half a file"), FAULTS))
def test_after_a_failed_answer_it_asks_again(tab: Tab, site: Site, run: Path, fault: str) -> None:
    open_page(tab, site)
    jobs_shown(tab, 1)
    site.faulty["index.js"] = FAULTS[fault]
    tab.wait("document.querySelector('#state').textContent.includes('No answer since')", 30)
    said = text(tab, "#state")
    assert said.startswith("Running: 1 of 3 at ")
    assert said.endswith("; this page asks again every 2 s.")
    assert "automatically" not in said
    site.faulty.clear()
    end(run, "b", "c")
    jobs_shown(tab, 3)
    assert text(tab, "#state") == ""
    assert text(tab, "#verdict") == "3 done, 0 failed"


@pytest.mark.parametrize("name", ["data-0001", "picks"])
def test_a_part_that_did_not_load_is_asked_for_again(
    tab: Tab, site: Site, run: Path, name: str
) -> None:
    (run / "picks.jsonl").write_text(json.dumps(PICKS) + "\n")
    site.faulty[name] = BAD
    RunPage(run).refresh(is_running=True)
    open_page(tab, site)
    tab.wait("document.querySelector('#reasons').textContent.includes('did not load')", 30)
    assert f"report/{name}.js did not load; this page asks again." in text(tab, "#reasons")
    assert tab.value("document.querySelector('#summary').className") != "tone-good"
    site.faulty.clear()
    jobs_shown(tab, 1)
    tab.wait("document.querySelector('.mark')?.textContent === 'picked'", 30)
    assert "did not load" not in text(tab, "#reasons")


PICKS = {
    "candidate_of": "a",
    "picked": ["a"],
    "missing": [],
    "chosen_by": "rule",
    "ranking": [{"custom_id": "a", "rank": 1, "values": {"text": 0.5}}],
    "rejected": [],
    "rule": {"scorers": {"text": {"higher_is_better": True}}},
}


def test_a_server_that_is_away_for_a_while_is_followed_again(
    tab: Tab, site: Site, run: Path
) -> None:
    """The open job stays open, and pictures that were asked for meanwhile come later."""
    site.faulty["outputs"] = b""
    open_page(tab, site)
    tab.wait("document.querySelector('.job .missing')")
    tab.click(".job")
    tab.wait(IS_OPEN)
    site.stop()
    tab.wait("document.querySelector('#state').textContent.includes('No answer since')", 30)
    site.faulty.clear()
    end(run, "b", is_running=True)
    site.start()
    jobs_shown(tab, 2)
    assert tab.value(IS_OPEN)
    tab.wait("document.querySelector('#show img')?.naturalWidth > 0", 30)
    tab.wait("document.querySelector('.job img')?.naturalWidth > 0", 30)
    assert count(tab, ".missing") == 0
    assert "New jobs appear automatically" in text(tab, "#state")


@pytest.mark.thorough
def test_a_server_that_takes_connections_and_says_nothing(tab: Tab, site: Site, run: Path) -> None:
    open_page(tab, site)
    jobs_shown(tab, 1)
    site.stop()
    with socket.create_server(("127.0.0.1", site.port)):
        tab.wait("document.querySelector('#state').textContent.includes('No answer since')", 60)
    end(run, "b", "c")
    site.start()
    jobs_shown(tab, 3)


def test_a_page_opened_before_the_server_answers_says_so(tab: Tab, site: Site, run: Path) -> None:
    site.faulty["index.js"] = BAD
    open_page(tab, site)
    assert text(tab, "#verdict") == "No answer from the server yet"
    assert text(tab, "#state") == "This page asks again every 2 s."
    site.faulty.clear()
    jobs_shown(tab, 1)


@pytest.mark.thorough
def test_a_run_that_goes_on_after_it_stopped_is_followed(tab: Tab, site: Site, run: Path) -> None:
    RunPage(run).refresh()
    open_page(tab, site)
    jobs_shown(tab, 1)
    assert text(tab, "#state") == "Stopped: 1 of 3. Run the same command again to resume."
    end(run, "b", is_running=True)
    jobs_shown(tab, 2)
    end(run, "c")
    jobs_shown(tab, 3)


def test_half_of_a_page_is_no_lasting_state_of_a_page_on_the_disk(tab: Tab, run: Path) -> None:
    """A network drive that is away for a moment."""
    tab.open(run / "report.html")
    jobs_shown(tab, 1)
    os.rename(run / "report", run / "away")
    tab.wait("document.querySelector('#state').textContent.includes('No answer since')", 30)
    os.rename(run / "away", run / "report")
    end(run, "b", is_running=True)
    jobs_shown(tab, 2)


@pytest.mark.thorough
def test_the_page_of_a_batch_follows_a_server_that_is_killed(tab: Tab, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = Path(__file__).with_name("live_server.py")
    environment = os.environ | {"PYTHONPATH": str(script.parent.parent)}
    with ExitStack() as held, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:

        def start() -> subprocess.Popen[bytes]:
            command = [sys.executable, str(script), str(tmp_path / "state"), str(port)]
            made = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            held.callback(made.wait)
            held.callback(made.kill)
            for _ in range(1000):
                with suppress(httpx.HTTPError):
                    if http.get("/ready").status_code == 200:
                        return made
                time.sleep(0.05)
            raise AssertionError("the server did not start")

        server = start()
        url = "/v1/images/generations"
        bodies = [{"prompt": str(n), "n": 2} for n in range(30)]
        lines = [{"custom_id": f"r{n}", "url": url, "body": one} for n, one in enumerate(bodies)]
        data = "".join(json.dumps(line) + "\n" for line in lines)
        file = http.post("/v1/files", files={"file": data}, data={"purpose": "batch"}).json()["id"]
        begin = {"input_file_id": file, "endpoint": url, "completion_window": "24h"}
        name = http.post("/v1/batches", json=begin).json()["id"]
        while http.get(f"/batches/{name}/").status_code != 200:
            time.sleep(0.05)
        tab.open(f"http://127.0.0.1:{port}/batches/{name}/")
        tab.wait("document.querySelectorAll('.job').length > 0")
        server.kill()
        server.wait()
        tab.wait("document.querySelector('#state').textContent.includes('No answer since')", 60)
        assert text(tab, ".title") == f"hyimg serve: {name}"
        assert count(tab, ".job") < 60
        start()
        tab.wait("document.querySelector('#verdict').textContent === '60 done, 0 failed'", 60)
        # The last picture is on the page a moment before the batch ends: its files come between.
        tab.wait("document.querySelector('#state').textContent === '30 of 30 requests.'", 60)
        jobs_shown(tab, 60)
        assert tab.value("seenErrors") == []
