"""A run whose manifest, sources and results lie in a bucket; its driver is killed on the way."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from store_server import s3_endpoint

from hyimg_cli import remote

Run = Callable[..., Any]
JOBS = 4


def filled(url: str, folder: Path) -> None:
    """The bucket with a manifest and the sources that it names."""
    system, _ = remote.located("s3://bucket")
    system.mkdir("bucket")
    lines = []
    for n in range(JOBS):
        Image.new("RGB", (64, 64), (60 * n, 90, 30)).save(folder / "in.png")
        system.put_file(str(folder / "in.png"), f"bucket/in/photo {n}.png")
        image = f"in/photo {n}.png" if n % 2 else f"s3://bucket/in/photo {n}.png"
        lines.append({"custom_id": f"job-{n}", "prompt": "brighter", "images": [image]})
    text = "".join(json.dumps(line | {"bot_task": "none"}) + "\n" for line in lines)
    system.pipe_file("bucket/jobs.jsonl", text.encode())


def test_killed_in_the_middle_and_resumed_elsewhere_with_the_bucket_alone(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real processes: what is asked is what a kill leaves of one, and of its threads."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with s3_endpoint() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint.url)
        remote._system.cache_clear()
        filled(endpoint.url, tmp_path)
        arguments = ["generate", "s3://bucket/jobs.jsonl", "-o", "s3://bucket/run", "--steps", "1"]
        arguments += ["--batching-max-size", "1", "--no-prewarm"]

        def started(place: str) -> "subprocess.Popen[str]":
            (tmp_path / place).mkdir()
            return subprocess.Popen(
                [sys.executable, "-m", "hyimg_cli", *arguments, "--cache-dir", "cache"],
                cwd=tmp_path / place,
                stderr=subprocess.PIPE,
                text=True,
            )

        first = started("one")

        def kill_at_the_third_line(method: str, path: str) -> str | None:
            if method == "PUT" and path.endswith("results/00000003.jsonl"):
                os.kill(first.pid, signal.SIGKILL)
                return "503"
            return None

        endpoint.fault = kill_at_the_third_line
        assert first.communicate()[1] is not None
        assert first.returncode == -signal.SIGKILL
        endpoint.fault = lambda method, path: None
        second = started("two")
        told = second.communicate()[1]
        assert second.returncode == 0, told
        assert "2 done, 0 failed, 2 skipped" in told
        assert "results in s3://bucket/run" in told
        made = Counter(path for method, path in endpoint.requests if method == "PUT")
        counts = [made[f"/bucket/run/outputs/job-{n}.png"] for n in range(JOBS)]
        assert counts == [1, 1, 2, 1]  # the third one had no line yet
        ran = run_cli("merge", "s3://bucket/run", "-o", tmp_path / "all")
        assert (ran.code, f"{JOBS} done, 0 failed, 0 missing" in ran.err) == (0, True)
        assert len(list((tmp_path / "all/outputs").iterdir())) == JOBS
        assert not list((tmp_path / "two").glob("s3*"))
    remote._system.cache_clear()
