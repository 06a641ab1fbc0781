"""A run's folder in an object store: SeaweedFS, and what may go wrong between it and a run."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from journal.test_job_pictures import SIZE, job, opened, saved
from journal.test_journal import resume
from store_server import Endpoint, addresses_at, s3_endpoint

from hyimg_cli import remote
from hyimg_cli.cli.inputs import recorded_names
from hyimg_cli.engine.recomposite import recomposite
from hyimg_cli.errors import (
    MachineError,
    OutputFolderError,
    StorageError,
    UsageError,
    installation,
)
from hyimg_cli.files import bytes_of
from hyimg_cli.journal import bucket
from hyimg_cli.journal.bucket import BucketFolder, PartJournal, run_folder
from hyimg_cli.journal.job_pictures import Drawing, finish, keep_redraws
from hyimg_cli.journal.journal import RESOLVED, RunFolder
from hyimg_cli.journal.keys import finishing_key
from hyimg_cli.media.carried import read_carried
from hyimg_cli.media.images import stretch
from hyimg_cli.settings.run import OutputConfig, RunConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Outcome, OutputFile, VideoFile
from hyimg_cli.spec.options import KeepOutside

PLACE = Path("s3://bucket/run")


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with s3_endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """The endpoint with an empty bucket, quick to lose patience."""
    monkeypatch.setattr(bucket, "RENEWED_S", 0.05)
    monkeypatch.setattr(bucket, "STALE_S", 0.3)
    served.fault, served.refusal = lambda method, path: None, None
    served.knows_conditions = True
    with addresses_at(served, monkeypatch):
        system, _ = remote.locate("s3://bucket")
        if names := system.find("bucket"):
            system.rm(names)
        served.requests.clear()
        yield served


@pytest.fixture
def _asked_once(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store refuses is not asked for again."""
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    patience = remote._S3_PATIENCE | {"retries": {"max_attempts": 1}}
    monkeypatch.setattr(remote, "_S3_PATIENCE", patience)
    remote._system.cache_clear()


def done(folder: RunFolder, name: str, data: bytes | None = None) -> Outcome:
    """A job with its file in the folder, not journaled yet."""
    path = folder.path_for(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data or name.encode())
    sha256 = digest.of_file(path)
    file = OutputFile(f"outputs/{name}.png", sha256, "0" * 64, 16, 16, 1)
    return Outcome(name, "done", key="k", outputs=(file,))


def names_in(folder: str) -> list[str]:
    system, path = remote.locate(folder)
    return sorted(name.removeprefix(f"{path}/") for name in system.find(path))


def test_files_are_put_before_their_lines_and_all_is_read_again(endpoint: Endpoint) -> None:
    killed = Path(f"{BucketFolder(PLACE).folder}".rpartition("-")[0] + f"-{2**22 + 1}")
    (killed / "outputs").mkdir(parents=True)
    with run_folder(PLACE) as folder:
        assert isinstance(folder, BucketFolder)
        assert not killed.exists()
        scratch = folder.folder
        for name in "ab":
            folder.append(done(folder, name))
        folder.append(Outcome("c", "failed", key="k"))
        assert not list((scratch / "outputs").iterdir())
        folder.write_run({"versions": {}})
    assert not scratch.exists()
    puts = [path for method, path in endpoint.requests if method == "PUT"]
    line = puts.index("/bucket/run/results/00000001.jsonl")
    assert puts.index("/bucket/run/outputs/a.png") < line < puts.index("/bucket/run/outputs/b.png")
    assert names_in("s3://bucket/run") == [
        *("outputs/a.png", "outputs/b.png"),
        *(f"results/0000000{n}.jsonl" for n in range(4)),
        "run.json",
    ]
    again = run_folder(PLACE)
    assert again.is_run
    assert not run_folder(PLACE / "elsewhere").is_run
    assert {name: line["status"] for name, line in again.results().items()} == {
        "a": "done",
        "b": "done",
        "c": "failed",
    }
    (output,) = again.results()["a"]["outputs"]
    assert again.holds([output])
    assert not again.holds([output | {"path": "outputs/gone.png"}])
    assert bytes_of(PLACE / "outputs/a.png", 100) == b"a"


@pytest.mark.usefixtures("endpoint")
def test_shards_share_an_address_and_each_has_its_own_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with run_folder(PLACE, (1, 2)) as one, run_folder(PLACE, (2, 2)) as two:
        one.append(done(one, "a"))
        two.append(done(two, "b"))
        assert sorted(run_folder(PLACE).results()) == ["a", "b"]
        monkeypatch.setattr(bucket, "STALE_S", 60)
        for other in ((1, 3), None, (1, 2)):
            with (
                pytest.raises(OutputFolderError, match="another run is writing"),
                run_folder(PLACE, other),
            ):
                pass
    assert names_in("s3://bucket/run") == [
        *("outputs/a.png", "outputs/b.png"),
        *(f"results-1-of-2/0000000{n}.jsonl" for n in range(2)),
        *(f"results-2-of-2/0000000{n}.jsonl" for n in range(2)),
    ]
    with run_folder(PLACE) as whole:
        assert sorted(whole.results()) == ["a", "b"]


def test_pieces_of_a_run_are_taken_once_followed_and_gathered(endpoint: Endpoint) -> None:
    with run_folder(PLACE) as folder:
        folder.begin_pieces(b"{}")
        assert folder.read_note("plan.json") == b"{}"
        read: dict[str, int] = {}
        with run_folder(PLACE, piece=0, local=folder.folder) as first:
            with pytest.raises(OutputFolderError, match="another run"), run_folder(PLACE, piece=0):
                pass
            first.append(done(first, "a"))
            with run_folder(PLACE, piece=1, local=folder.folder) as second:
                second.append(done(second, "b"))
            assert len([*folder.new_lines(read)]) == 2
            assert [*folder.new_lines(read)] == []
            folder.gather()  # not while one is written
            assert folder.read_note("plan.json")
            assert sorted(run_folder(PLACE).results()) == ["a", "b"]
        with run_folder(PLACE, piece=0) as again:
            assert dict(again.attempts) == {"a": 1}
    names = names_in("s3://bucket/run")
    assert not [name for name in names if name.startswith(("pieces", "lease"))]
    assert sorted(run_folder(PLACE).results()) == ["a", "b"]
    assert not run_folder(PLACE).is_locked


@pytest.mark.usefixtures("endpoint")
def test_names_of_results_are_found_there_made_or_planned() -> None:
    with run_folder(PLACE) as folder:
        folder.append(replace(done(folder, "Größe"), custom_id="a"))
        planned = [{"custom_id": "a"}, {"custom_id": "b", "name": "{{ä}}"}, {"custom_id": "c"}]
        folder.write_lines(
            RESOLVED, [*planned, {"custom_id": "d", "name": "{width}"}, {"custom_id": "../e"}]
        )
    assert recorded_names(run_folder(PLACE)) == {"a": "Größe", "b": "{ä}", "c": "c"}


def test_who_is_taken_for_dead_stops_at_its_next_line(endpoint: Endpoint) -> None:
    """It was frozen, and its lease ran out; no clock is asked."""
    store = bucket._locate_folder("s3://bucket/run")
    first = PartJournal(store, PLACE, "first")
    first.append([b'{"custom_id": "a"}\n'])
    second = PartJournal(store, PLACE, "second")
    with pytest.raises(
        StorageError, match="another run is writing to this folder; this run lost its lock"
    ) as lost:
        first.append([b'{"custom_id": "b"}\n'])
    assert (lost.value.code, lost.value.where) == ("storage.in-use", "s3://bucket/run")
    second.append([b'{"custom_id": "c"}\n'])
    with pytest.raises(StorageError):
        first.append([b'{"custom_id": "b"}\n'])
    assert list(run_folder(PLACE).results()) == ["a", "c"]


def test_writers_that_take_over_from_each_other_lose_no_line_that_was_acknowledged(
    endpoint: Endpoint,
) -> None:
    acknowledged: list[str] = []

    def write(writer: int) -> None:
        store = bucket._locate_folder("s3://bucket/run")
        for turn in range(4):
            try:
                journal = PartJournal(store, PLACE, f"{writer} {turn}")
                for n in range(3):
                    name = f"{writer}-{turn}-{n}"
                    journal.append([json.dumps({"custom_id": name}).encode() + b"\n"])
                    acknowledged.append(name)
            except (StorageError, OutputFolderError):
                continue

    threads = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert acknowledged
    assert sorted(run_folder(PLACE).results()) == sorted(acknowledged)


def once(fault: Any, wanted: Callable[[str, str], bool]) -> Callable[[str, str], Any]:
    """The fault at the first request that is wanted, and at no other."""
    left = [fault]
    return lambda method, path: left.pop() if left and wanted(method, path) else None


def either(*faults: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    return lambda method, path: next(filter(None, (one(method, path) for one in faults)), None)


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        *((fault, "results/00000001") for fault in ("lost", "503", "409", "failed", "twice", 0.3)),
        *((fault, "outputs/a.png") for fault in ("lost", "503", "doubled", 0.3)),
    ],
)
def test_a_lost_answer_a_busy_store_and_a_slow_one_cost_no_line(
    endpoint: Endpoint, fault: Any, part: str
) -> None:
    with run_folder(PLACE) as folder:
        endpoint.fault = once(fault, lambda method, path: method == "PUT" and part in path)
        folder.append(done(folder, "a"))
        folder.append(done(folder, "b"))
    tries = [path for method, path in endpoint.requests if method == "PUT" and part in path]
    assert len(tries) == (1 if fault in ("twice", "doubled", 0.3) else 2)
    assert list(run_folder(PLACE).results()) == ["a", "b"]
    assert len([name for name in names_in("s3://bucket/run") if "results" in name]) == 3


def test_an_answer_that_comes_twice_counts_for_its_own_request_only(endpoint: Endpoint) -> None:
    """A line would follow a file that the store never took."""
    with run_folder(PLACE) as folder:
        outcomes = [done(folder, name) for name in "abcd"]
        for outcome in outcomes:
            doubled = once("doubled", lambda method, path: method == "PUT" and "results" in path)
            busy = once("503", lambda method, path: method == "PUT" and "outputs" in path)
            endpoint.fault = either(doubled, busy)
            folder.append(outcome)
            time.sleep(0.05)
    lines = run_folder(PLACE).results()
    assert list(lines) == [*"abcd"]
    files = {f"outputs/{name}.png" for name in lines}
    assert files <= {*names_in("s3://bucket/run")}


@pytest.mark.usefixtures("_asked_once")
def test_a_store_that_stays_away_ends_the_run_in_plain_words(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_folder(PLACE) as folder:
        outcome = done(folder, "a")
        endpoint.fault = lambda method, path: "503"
        with pytest.raises(StorageError, match="the store reported an error") as refused:
            folder.append(outcome)
        assert refused.value.where == "s3://bucket/run"
        endpoint.fault = lambda method, path: "503" if "results" in path else None
        with pytest.raises(StorageError, match="the store reported an error") as refused:
            folder.append(outcome)
        assert refused.value.where == "s3://bucket/run"
        endpoint.fault = lambda method, path: None
    assert run_folder(PLACE).results() == {}
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    remote._system.cache_clear()
    with pytest.raises(StorageError, match="the store reported an error"):
        run_folder(PLACE).results()


@pytest.mark.parametrize("knows_conditions", [True, False])
def test_a_store_without_conditions_is_refused(endpoint: Endpoint, knows_conditions: bool) -> None:
    """Whether it ignores them, as rclone does, or says that it does not know them."""
    endpoint.knows_conditions = knows_conditions
    if knows_conditions:
        endpoint.fault = lambda method, path: "501" if method == "PUT" else None
    with (
        pytest.raises(MachineError, match="two writers to create the same object") as refused,
        run_folder(PLACE),
    ):
        pass
    assert (refused.value.code, refused.value.where) == ("machine.store", "s3://bucket/run/results")


_REFUSED = b"<Error><Code>PreconditionFailed</Code><Message>It did not hold</Message>%b</Error>"
_OF_MINIO = b"<Key>k</Key><BucketName>bucket</BucketName><Resource>/bucket/k</Resource><Region/>"


@pytest.mark.parametrize(
    "refusal",
    [
        *(None, b"", b"<html>412 Precondition Failed</html>", _REFUSED % _OF_MINIO),
        _REFUSED % b"<Condition>If-None-Match</Condition>",
        b"<Error><Code>412</Code></Error>",
    ],
    ids=["SeaweedFS", "nothing", "a proxy", "MinIO", "AWS", "a number"],
)
def test_a_store_says_in_its_own_words_that_a_part_exists(
    endpoint: Endpoint, refusal: bytes | None
) -> None:
    endpoint.refusal = refusal
    store = bucket._locate_folder("s3://bucket/run")
    first = PartJournal(store, PLACE, "first")
    endpoint.fault = once("twice", lambda method, path: path.endswith("00000001.jsonl"))
    first.append([b'{"custom_id": "a"}\n'])
    PartJournal(store, PLACE, "second").append([b'{"custom_id": "b"}\n'])
    with pytest.raises(StorageError, match="this run lost its lock"):
        first.append([b'{"custom_id": "c"}\n'])
    assert list(run_folder(PLACE).results()) == ["a", "b"]


def test_a_run_that_is_replaced_before_its_first_line_is_refused_as_one_that_comes_later(
    endpoint: Endpoint,
) -> None:
    """Two that begin together find no lease of each other; one of them has drawn nothing."""
    store = bucket._locate_folder("s3://bucket/run")
    first = PartJournal(store, PLACE, "first")
    PartJournal(store, PLACE, "second")
    with pytest.raises(OutputFolderError, match="another run is writing to this folder") as refused:
        first.append([b'{"custom_id": "a"}\n'])
    assert (refused.value.code, refused.value.where) == ("output.in-use", "s3://bucket/run")


def test_a_lease_that_is_renewed_is_a_polite_refusal_and_a_dead_one_none(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_folder(PLACE), monkeypatch.context() as patch:
        patch.setattr(bucket, "STALE_S", 60)
        with pytest.raises(OutputFolderError, match="another run is writing"), run_folder(PLACE):
            pass
    system, _ = remote.locate("s3://bucket")
    lease = {"run": "killed", "host": "elsewhere", "process": 1, "time": 1e12}
    system.pipe_file("bucket/run/lease.json", json.dumps(lease).encode())
    with run_folder(PLACE) as folder:
        folder.append(Outcome("a", "failed", key="k"))
    assert list(run_folder(PLACE).results()) == ["a"]


def test_a_run_that_was_replaced_leaves_the_lease_of_its_successor_alone(
    endpoint: Endpoint,
) -> None:
    """It neither renews it nor removes it at its end."""
    asked, written = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "GET" and path.endswith("lease.json"):
            asked.set()
            written.wait(10)

    def asked_for() -> int:
        return sum(path.endswith("lease.json") for method, path in endpoint.requests)

    system, _ = remote.locate("s3://bucket")
    with run_folder(PLACE):
        endpoint.fault = hold
        is_asked = asked.wait(10)
        system.pipe_file("bucket/run/lease.json", b'{"run": "successor"}')
        written.set()
        assert is_asked, "a renewal reads the lease first"
        until = asked_for() + 3
        while asked_for() < until:
            time.sleep(0.01)
        assert system.cat_file("bucket/run/lease.json") == b'{"run": "successor"}'
    assert system.cat_file("bucket/run/lease.json") == b'{"run": "successor"}'


def test_no_lease_is_left_behind_by_a_renewal_on_its_way(endpoint: Endpoint) -> None:
    on_its_way = threading.Event()

    def slow(method: str, path: str) -> float | None:
        if method != "PUT" or not path.endswith("lease.json"):
            return None
        on_its_way.set()
        return 0.2

    with run_folder(PLACE) as folder:
        assert isinstance(folder, BucketFolder)
        endpoint.fault = slow
        assert on_its_way.wait(60)
    assert not folder._renewing.is_alive(), "it would put the lease back"
    assert "lease.json" not in names_in("s3://bucket/run")


def test_a_run_that_ends_waits_no_longer_for_its_lease_than_the_next_one_would(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_PARTING_S", 0.1)
    asked, ended, answered_after = threading.Event(), threading.Event(), list[bool]()

    def hang(method: str, path: str) -> None:
        if path.endswith("lease.json"):
            asked.set()
            answered_after.append(ended.wait(30))

    with run_folder(PLACE) as folder:
        assert isinstance(folder, BucketFolder)
        endpoint.fault = hang
        assert asked.wait(60)
    ended.set()
    folder._renewing.join()
    assert all(answered_after), "the end waited for the store"
    assert not folder.folder.exists()


@pytest.mark.usefixtures("_asked_once")
def test_a_run_that_cannot_begin_says_why_and_holds_no_other_up(endpoint: Endpoint) -> None:
    """The lease comes last: its thread was never begun."""
    endpoint.fault = lambda method, path: (
        "503" if method == "PUT" and path.endswith("lease.json") else None
    )
    folder = run_folder(PLACE)
    assert isinstance(folder, BucketFolder)
    with pytest.raises(StorageError, match="the store reported an error"), folder:
        pass
    assert folder._renewing.ident is None
    endpoint.fault = lambda method, path: None
    with run_folder(PLACE) as other:
        other.append(Outcome("a", "failed", key="k"))


def test_many_parts_are_joined_once_and_a_hole_is_told(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_JOINED_AFTER", 4)
    with run_folder(PLACE) as folder:
        for n in range(5):
            folder.append(Outcome(f"job-{n % 4}", "failed", key=str(n)))
    with run_folder(PLACE) as folder:
        folder.append(Outcome("last", "failed", key="k"))
    assert "results/00000006.all.jsonl" in names_in("s3://bucket/run")
    endpoint.requests.clear()
    results = run_folder(PLACE).results()
    assert [line["key"] for line in results.values()] == ["4", "1", "2", "3", "k"]
    assert len({path for _, path in endpoint.requests if path.endswith(".jsonl")}) == 2
    system, _ = remote.locate("s3://bucket")
    with run_folder(PLACE) as folder:
        folder.append(Outcome("more", "failed", key="k"))
    system.rm_file("bucket/run/results/00000008.jsonl")
    missing = r"part 00000008\.jsonl of the journal is missing"
    with pytest.raises(OutputFolderError, match=missing) as refused:
        run_folder(PLACE).results()
    assert refused.value.where == "s3://bucket/run/results"


@pytest.mark.usefixtures("endpoint")
def test_without_credentials_it_is_said_how_to_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    remote._system.cache_clear()
    with pytest.raises(OSError, match="credentials are not set: run aws configure"):
        bytes_of(Path("s3://bucket/a.png"), 9)


def test_what_is_read_is_kept_by_its_tag(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyimg_cli.cache.disk import DiskStore

    monkeypatch.setattr(remote, "_copies", [DiskStore(tmp_path, 1_000_000)])
    system, _ = remote.locate("s3://bucket")
    system.pipe_file("bucket/a b#ü.png", b"one")
    place = Path("s3://bucket/a b#ü.png")
    endpoint.requests.clear()
    assert [bytes_of(place, 10) for _ in range(2)] == [b"one", b"one"]
    assert len([method for method, _ in endpoint.requests if method == "GET"]) == 1
    system.pipe_file("bucket/a b#ü.png", b"two")
    assert bytes_of(place, 10) == b"two"
    with pytest.raises(OSError, match="limit 2 bytes"):
        bytes_of(place, 2)
    with pytest.raises(FileNotFoundError) as missing:
        bytes_of(Path("s3://bucket/none.png"), 2)
    assert missing.value.strerror == "No such file or directory"


def test_a_film_that_says_nothing_has_no_sidecar_there_either(endpoint: Endpoint) -> None:
    """Nor has it that of an earlier film, which would tell of another job."""
    with run_folder(PLACE) as folder:
        for has_sidecar in (True, False):
            film = folder.path_for("a", ".mp4")
            film.write_bytes(b"a film")
            if has_sidecar:
                film.with_suffix(".json").write_text("{}")
            sha256 = digest.of_file(film)
            file = VideoFile("outputs/a.mp4", sha256, "0" * 64, 16, 16, 1, 5, 8)
            folder.append(Outcome("a", "done", key=str(has_sidecar), outputs=(file,)))
            names = ["a.json", "a.mp4"] if has_sidecar else ["a.mp4"]
            assert names_in("s3://bucket/run/outputs") == names
            folder.supersede({"a": ["outputs/a.mp4", "outputs/a.json"]})


def test_an_edit_is_finished_again_from_the_redraw_in_the_store(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    """Source, redraw and result lie there; another region needs no model, and no other file."""
    source = saved(tmp_path, "RGB")
    system, _ = remote.locate("s3://bucket")
    system.put_file(str(source), "bucket/in.png")
    first, second = (
        replace(job(source, KeepOutside(region=region)), images=("s3://bucket/in.png",))
        for region in ("", "0,0,75,101")
    )
    shown = stretch(read_carried(source).pixels, SIZE)
    drawn = shown.copy()
    drawn[20:44, 30:60] = (40, 60, 210)
    config = RunConfig(OutputConfig(PLACE))
    with run_folder(PLACE) as folder:
        edit = keep_redraws(folder, first, [Drawing(drawn, shown)], None)
        file = finish(folder, first, [Drawing(drawn, shown)], edit, config.output)
        key = finishing_key(first, config.output)
        folder.append(Outcome("a", "done", key="k", outputs=(file,), edit=edit, finishing_key=key))
    endpoint.requests.clear()
    with run_folder(PLACE) as folder:
        assert resume(folder, [second], {"a": "k"}, config).to_finish == [second]
        (outcome,) = recomposite(folder, [second], config)
        assert outcome.status == "done", outcome.error
        again = resume(folder, [second], {"a": "k"}, config)
        assert (again.done, again.to_finish) == (["a"], [])
    read = [path.rpartition("/")[2] for method, path in endpoint.requests if method == "GET"]
    assert {name for name in read if name.startswith("a.")} == {"a.redraw.png", "a.reference.png"}
    system.get(f"bucket/run/{outcome.outputs[0].path}", str(tmp_path / "result.png"))
    assert outcome.edit is not None
    system.get(f"bucket/run/{outcome.edit['mask']}", str(tmp_path / "mask.png"))
    free = opened(tmp_path / "mask.png") == 0
    assert free[:, 75:].all()
    assert np.array_equal(opened(tmp_path / "result.png")[free], opened(source)[free])


def test_a_missing_library_a_password_and_an_unknown_store_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="must not contain a password") as refused:
        remote.locate("s3://key:secret@bucket/run")
    assert "secret" not in str(refused.value)
    with pytest.raises(UsageError, match="the address is malformed"):
        remote.locate("s3://[bucket/run")
    for address in ("nowhere://bucket", "github://owner/run", "dir://run", "zip://run"):
        with pytest.raises(UsageError, match="from an address alone"):
            remote.locate(address)
    for missing, scheme, command in (
        ("fsspec", "s3", installation("s3")),
        ("fsspec", "gs", "pip install gcsfs"),
        ("gcsfs", "gs", "pip install gcsfs"),
        ("adlfs", "az", "pip install adlfs"),
        ("smbclient", "smb", ""),
    ):
        remote._system.cache_clear()
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(MachineError, match=f"{scheme}:// needs a library") as refused:
            remote.locate(f"{scheme}://bucket/run")
        hint = command or "install that library, or copy"
        assert refused.value.hint.startswith(hint)
        monkeypatch.undo()
