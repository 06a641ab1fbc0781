"""hyimg serve behind nginx, with exactly the directives of docs/serve-operation.md."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from real.commands import HERE, KILLS, REPOSITORY, Hyimg, stopped, wait_for
from real.conftest import Needs
from store_server import free_ports

GENERATE = "/v1/images/generations"
KEYS = {"ann": "secret-a", "bob": "secret-b"}
# The default of nginx's proxy_read_timeout, and the documented limit to an upload.
PATIENCE_S, UPLOAD = 60, 200_000_000
CONFIG = """
daemon off; master_process off; {user} pid {folder}/pid; error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      {directives}
    }}
  }}
}}
"""


class Served:
    """A server of the embedded model, and the proxy before it."""

    def __init__(self, hyimg: Hyimg) -> None:
        self.hyimg = hyimg
        self.port, own = free_ports(2)
        folder = hyimg.folder / "nginx"
        folder.mkdir()
        page = (REPOSITORY / "docs/serve-operation.md").read_text()
        (directives,) = re.findall(r"```nginx\n(.*?)```", page, re.S)
        user = "" if os.geteuid() else "user root;"
        config = folder / "nginx.conf"
        config.write_text(
            CONFIG.format(
                folder=folder,
                port=own,
                user=user,
                directives=directives.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}"),
            )
        )
        (hyimg.folder / "keys").write_text("".join(f"{n} {key}\n" for n, key in KEYS.items()))
        hyimg.start("nginx", "-p", folder, "-e", "stderr", "-c", config, said="nginx-said")
        self.url = f"http://127.0.0.1:{own}"
        self.start()

    def start(self) -> None:
        words = ["serve", "--model", "tiny-image", "-o", "served", "--port", self.port]
        words += ["--api-key-file", "keys", "--batching-max-size", "1"]
        self.process = self.hyimg.start("hyimg", *words, said="serve-said")
        wait_for(self.is_ready, f"/ready is 200: {self.hyimg.said('serve-said')[-2000:]}")

    def is_ready(self) -> bool:
        """Ask as a container's probe does, without a key."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=10).status_code == 200
        except httpx.TransportError:  # nginx is not there yet
            return False

    def client(self, name: str = "ann", **head: str) -> httpx.Client:
        head |= {"authorization": f"Bearer {KEYS[name]}"}
        return httpx.Client(base_url=self.url, headers=head, timeout=300)

    def batch(self, client: httpx.Client, lines: int, **body: Any) -> str:
        """Create a batch of pictures and return its id."""
        rows = [
            {"custom_id": f"{n}", "method": "POST", "url": GENERATE}
            | {"body": {"prompt": "a red circle", "seed": n, "response_format": "url"} | body}
            for n in range(lines)
        ]
        data = "".join(f"{json.dumps(row)}\n" for row in rows)
        file = client.post("/v1/files", files={"file": data}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": GENERATE, "completion_window": "24h"}
        return str(client.post("/v1/batches", json=asked).json()["id"])

    def ended(self, client: httpx.Client, batch: str) -> dict[str, Any]:
        """Return a batch once it has ended."""
        found: dict[str, Any] = {}

        def is_ended() -> bool:
            answer = client.get(f"/v1/batches/{batch}")
            if answer.status_code == 200:
                found.update(answer.json())
            return found.get("status") in ("completed", "failed", "expired", "cancelled")

        wait_for(is_ended, f"batch {batch} ends", 600)
        return found


@pytest.fixture(scope="module")
def served(needs: Needs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    needs("nginx")
    folder = tmp_path_factory.mktemp("served")
    hyimg = Hyimg(folder, {"PATH": f"{HERE}:{os.environ['PATH']}:/usr/sbin:/sbin"})
    try:
        yield Served(hyimg)
    finally:
        hyimg.end()


def test_keys_are_asked_for_as_without_a_proxy(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert httpx.get(f"{served.url}/metrics").status_code == 401
    assert httpx.post(f"{served.url}{GENERATE}", json={"prompt": "a"}).status_code == 401
    with served.client() as ann, served.client("bob") as bob:
        file = ann.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}).json()
        assert ann.get(f"/v1/files/{file['id']}").status_code == 200
        assert bob.get(f"/v1/files/{file['id']}").status_code == 404


def test_a_web_page_of_the_proxys_name_may_post(served: Served) -> None:
    head = {"origin": "https://pictures.example", "host": "pictures.example"}
    with served.client(**head) as page:
        answer = page.post(GENERATE, json={"prompt": "a cat", "num_inference_steps": 1})
        assert answer.status_code == 200, answer.text


def test_the_official_client_draws_edits_and_reads_a_result_by_its_path(served: Served) -> None:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=KEYS["ann"], _strict_response_validation=True
    ) as client:
        extra = {"num_inference_steps": 1, "seed": 3}
        first = client.images.generate(prompt="a red circle", extra_body=extra)
        by_url = client.images.generate(
            prompt="a red circle", response_format="url", extra_body=extra
        )
        assert first.data is not None
        assert by_url.data is not None
        path = httpx.URL(by_url.data[0].url or "").path
        with served.client() as ann:
            found = ann.get(path)
        assert found.headers["content-type"] == "image/png"
        edited = client.images.edit(
            image=("in.png", found.content), prompt="make the circle blue", extra_body=extra
        )
        assert edited.data is not None
        assert edited.data[0].b64_json


def test_each_event_comes_when_its_picture_is_drawn(served: Served) -> None:
    body = {"prompt": "a cat", "n": 4, "stream": True, "num_inference_steps": 20, "seed": 5}
    came = []
    with served.client() as client, client.stream("POST", GENERATE, json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("event: "):
                came.append((line, time.monotonic()))
    assert [kind for kind, _ in came] == ["event: image_generation.completed"] * 4
    apart = [later - sooner for (_, sooner), (_, later) in pairwise(came)]
    assert min(apart) > 0.02, "together: the proxy kept them back"


def test_a_file_of_the_documented_size_and_one_above(served: Served, tmp_path: Path) -> None:
    for size, status in ((UPLOAD, 200), (UPLOAD + 1, 413), (UPLOAD + 50_000_000, 413)):
        path = tmp_path / "jobs.jsonl"
        path.touch()
        os.truncate(path, size)
        with path.open("rb") as file, served.client() as client:
            answer = client.post("/v1/files", files={"file": file}, data={"purpose": "batch"})
            assert answer.status_code == status, answer.text
            said = answer.json()  # hyimg's own words, not a page of nginx
            if status == 200:
                assert said["bytes"] == size
                assert client.delete(f"/v1/files/{said['id']}").status_code == 200
            else:
                assert said["error"]["code"] == "request.too-large"


def test_the_page_of_a_batch_opens_after_one_login(served: Served) -> None:
    with served.client() as ann:
        batch = served.batch(ann, 3, num_inference_steps=1)
        assert served.ended(ann, batch)["request_counts"]["completed"] == 3
    path, head = f"/batches/{batch}/", {"accept": "text/html,*/*", "host": "pictures.example"}
    with httpx.Client(base_url=served.url, headers=head, timeout=60) as browser:
        asked = browser.get(path)
        assert (asked.status_code, 'type="password"' in asked.text) == (401, True)
        post = {"origin": "https://pictures.example", "sec-fetch-site": "same-origin"}
        let_in = browser.post(path, data={"key": KEYS["ann"]}, headers=post)
        assert (let_in.status_code, let_in.headers["location"]) == (303, path)
        cookie = {"cookie": let_in.headers["set-cookie"].partition(";")[0]}
        page = browser.get(path, headers=cookie)
        assert page.status_code == 200
        assert batch in page.text
        for name in re.findall(r'(?:src|href)="((?!data:|https?:|#)[^"]+)"', page.text):
            assert browser.get(f"{path}{name}", headers=cookie).status_code == 200, name
        assert browser.get("/v1/batches", headers=cookie).status_code == 401


def test_an_answer_that_takes_longer_than_nginx_waits_by_itself(served: Served) -> None:
    """Its own patience is a minute; the server stands still for longer."""
    with served.client() as client, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "a cat", "num_inference_steps": 50, "seed": 9}
        answer = pool.submit(client.post, GENERATE, json=body)
        time.sleep(0.5)
        served.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(PATIENCE_S + 5)
            assert not answer.done()
        finally:
            served.process.send_signal(signal.SIGCONT)
        assert answer.result().status_code == 200


def test_a_server_that_is_killed_behind_it_and_comes_again(served: Served) -> None:
    """Clients get 502 in between; the batch ends with each request once."""
    lines = 4 * KILLS
    with served.client() as ann:
        batch = served.batch(ann, lines, num_inference_steps=10)
        for n in range(KILLS):

            def is_further(n: int = n) -> bool:
                shown = ann.get(f"/v1/batches/{batch}").json()
                return bool(shown["request_counts"]["completed"] > n or "completed_at" in shown)

            wait_for(is_further, f"request {n + 1} of the batch is done")
            assert stopped(served.process, signal.SIGKILL) == -signal.SIGKILL
            assert ann.get(f"/v1/batches/{batch}").status_code == 502
            served.start()
        found = served.ended(ann, batch)
        assert found["request_counts"] == {"total": lines, "completed": lines, "failed": 0}
        output = ann.get(f"/v1/files/{found['output_file_id']}/content").text.splitlines()
        names = sorted(int(json.loads(line)["custom_id"]) for line in output)
        assert names == list(range(lines))


def test_a_server_that_is_stopped_answers_what_it_has_begun(served: Served) -> None:
    with served.client() as client, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "a cat", "num_inference_steps": 50, "seed": 11}
        answer = pool.submit(client.post, GENERATE, json=body)
        time.sleep(0.5)
        served.process.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 200
        assert served.process.wait(60) == 0
        assert httpx.get(f"{served.url}/ready").status_code == 502
    served.start()
    assert served.is_ready()
