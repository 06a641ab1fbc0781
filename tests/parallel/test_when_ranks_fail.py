"""Ranks that fail, die, hang, and end with their parent: an error within seconds, never a wait."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import rank_tasks
import torch
import torch.distributed as dist
from rank_tasks import DyingVae, ShortVae

from hyimg_cli.errors import CheckpointError, MachineError, RankError
from hyimg_cli.models.diffusers_video import networks
from hyimg_cli.models.diffusers_video.networks import SplitTokens
from hyimg_cli.parallel import ranks, tensor
from hyimg_cli.parallel.ranks import Rank, RankPool
from hyimg_cli.tiling.decode import PatchParallelDecoder, decode_tiled
from hyimg_cli.tiling.tiles import halve_tiles

PARENT = """
import sys, time
from rank_tasks import number, sleep
from hyimg_cli.parallel.ranks import RankPool
pool = RankPool(2)
pool.run(number)
pool._members[0].child.post((sleep, (600.0,)))
print(*pool.member_pids, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _one_group_a_process(pool: RankPool) -> None:
    """The shared ranks leave; they would start again where they are used."""
    pool.stop()


def is_alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody waited for does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if stat.exists():
            return stat.read_text().rpartition(")")[2].split()[0] != "Z"
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not Path("/proc").exists()


def gone_within(pids: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_member_that_raises_ends_the_task_and_the_next_one_works() -> None:
    with RankPool(2, timeout_s=120) as pool:
        pool.start()
        pids = pool.member_pids
        started = time.monotonic()
        with pytest.raises(RankError, match="rank 1 failed: ValueError: a bad tile") as raised:
            pool.run(rank_tasks.fail, 1)
        assert time.monotonic() - started < 60
        assert raised.value.retryable
        assert gone_within(pids, 60)
        assert pool.run(rank_tasks.number) == [0, 1]
        assert pool.member_pids != pids
        with pytest.raises(KeyError, match="rank 0 itself"):
            pool.run(rank_tasks.fail_at_home)
        assert not pool.member_pids


@pytest.mark.thorough
def test_a_rank_killed_between_tiles_ends_the_job_and_not_the_run(tmp_path: Path) -> None:
    trigger = tmp_path / "die"
    trigger.touch()
    latents = torch.randn(1, 4, 2, 30, 53)
    with RankPool(2, timeout_s=120) as pool:
        pool.load("vae", DyingVae(victim=1, trigger=trigger))
        decoder = PatchParallelDecoder(pool)
        started = time.monotonic()
        with pytest.raises(RankError, match="rank 1 failed: killed by signal 9"):
            decoder.decode(latents)
        assert time.monotonic() - started < 60
        # The next job starts the rank again, and its autoencoder with it.
        found = decoder.decode(latents)
        assert torch.equal(found, decode_tiled(pool.here.parts["vae"], latents))


@pytest.mark.thorough
def test_a_rank_that_is_short_of_memory_is_short_as_one_process_is(tmp_path: Path) -> None:
    """In the own tiles, then in those of half the side; both ranks decode what comes next."""
    (tmp_path / "a tile").touch()
    latents = torch.randn(1, 4, 2, 30, 53)
    with RankPool(2, timeout_s=120) as pool:
        pool.load("vae", ShortVae(tmp_path))
        pool.load("model", rank_tasks.number)
        decoder, vae = PatchParallelDecoder(pool), pool.here.parts["vae"]
        with pytest.raises(torch.OutOfMemoryError, match=r"rank 1 failed: .* no room for a tile"):
            decoder.decode(latents)
        pool.unload("model")
        half = halve_tiles(vae.tiling)
        found = decoder.decode(latents, half)
        assert torch.equal(found, decode_tiled(vae, latents, half))
        assert not torch.equal(found, decode_tiled(vae, latents))
        assert decoder.report is not None
        assert all(one.tiles > 1 for one in decoder.report.ranks)
        assert pool.run(rank_tasks.parts)[1] == ["vae"]


def test_what_a_loader_raises_arrives_as_it_is(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        with pytest.raises(CheckpointError, match="no such weights") as raised:
            pool.load("model", rank_tasks.absent_on_members)
        assert (raised.value.where, raised.value.hint) == ("rank 1", "look again")
        assert not pool.member_pids


def test_a_rank_that_says_nothing_is_not_waited_for_forever() -> None:
    quick = RankPool(2, timeout_s=60)
    quick.start()  # which may take its time
    quick.here.timeout_s = 0.6
    with pytest.raises(RankError, match="rank 1 did not answer within 1 s"):
        quick.run(rank_tasks.sleep, 30.0)
    assert not quick.member_pids
    quick.here.timeout_s = 4.0  # the group is formed and waits by this
    with pytest.raises(RankError, match="a rank did not answer within 4 s") as raised:
        quick.run(rank_tasks.wait_for, 1)
    assert raised.value.code == "rank.timeout"
    assert not quick.member_pids


def test_ranks_that_cannot_start_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = RankPool(2)
    with pytest.raises(MachineError, match="did not start: rank 1 failed: exit status 1"):
        pool.run(rank_tasks.number)
    assert not pool.member_pids


def test_members_end_with_a_killed_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 1
        assert is_alive(pids[0])
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert gone_within(pids, 60)


def test_on_gpus_a_group_is_aborted_before_it_is_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nccl finishes what is on its way when it is destroyed, and the others have ended by then."""
    done: list[str] = []
    monkeypatch.setattr(ranks.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(ranks, "abort_groups", lambda: done.append("abort"))
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda: done.append("destroy"))
    ranks._forget_group()
    assert done == ["abort", "destroy"]


def test_when_a_rank_dies_every_group_is_aborted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum over a part of the ranks waits in a group of its own; each may wait for the other."""
    here = Rank(0, 1, torch.device("cpu"), timeout_s=60)
    ranks.form_group(str(tmp_path / "store"), here)
    try:
        part, aborted = dist.new_group([0]), []
        both = threading.Barrier(2, timeout=60)

        def abort(group: dist.ProcessGroup) -> None:
            both.wait()
            aborted.append(group)

        monkeypatch.setattr(dist.ProcessGroup, "abort", abort)
        ranks.abort_groups()
        assert sorted(aborted, key=id) == sorted([dist.group.WORLD, part], key=id)
    finally:
        dist.destroy_process_group()


def test_a_group_of_a_part_of_the_ranks_is_formed_as_that_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else gloo asks for the host's name, and nccl ends the process of whoever aborts it."""
    seen: list[dict[str, str]] = []

    def formed(*_: object, **__: object) -> None:
        seen.append(dict(os.environ))
        raise InterruptedError

    class World:
        def size(self) -> int:
            return 4

    split = SplitTokens([], torch.device("cpu"), by_token=False)
    monkeypatch.setattr(dist, "new_group", formed)
    monkeypatch.setattr(networks, "init_device_mesh", formed)
    for form in (lambda: tensor._group(range(2), World()), lambda: split.split(2)):  # type: ignore[arg-type]
        with pytest.raises(InterruptedError):
            form()
    assert [own["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for own in seen] == ["0", "0"]
    assert {own["GLOO_SOCKET_IFNAME"] for own in seen} <= {"lo", "lo0"}
