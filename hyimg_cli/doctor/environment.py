"""Python, the packages in their versions, and the processors that torch can use."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hyimg_cli import __version__
from hyimg_cli.doctor.check import Check
from hyimg_cli.journal.keys import precision
from hyimg_cli.journal.provenance import cores, cpu_name
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.units import bytes_text

OURS = "hyimg-cli"
_UNKNOWN = "hyimg is not installed as a package, so the versions that it needs are not known"
_INSTALL = "pip install hyimg-cli, in a fresh environment"


def python(config: RunConfig) -> Check:
    """Python's version against what the package asks for."""
    found = f"Python {platform.python_version()}, hyimg {__version__}"
    try:
        wanted = SpecifierSet(metadata(OURS)["Requires-Python"])
    except PackageNotFoundError:
        return Check("warning", f"{found}; {_UNKNOWN}", _INSTALL)
    if not wanted.contains(platform.python_version(), prereleases=True):
        return Check("failed", f"{found}; needed is {wanted}", "use another Python")
    return Check("ok", f"{found} (needed: {wanted})")


def packages(config: RunConfig) -> Check:
    """Every package that hyimg needs, against the range in its own metadata."""
    try:
        needed = [Requirement(text) for text in requires(OURS) or ()]
    except PackageNotFoundError:
        return Check("warning", _UNKNOWN, _INSTALL)
    here = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    faults = [fault for one in here for fault in _package_faults(one)]
    if faults:
        hint = "pip install --upgrade hyimg-cli brings the versions it needs"
        return Check("failed", "; ".join(faults), hint)
    told = ("torch", "transformers", "diffusers")
    shown = ", ".join(f"{name} {version(name)}" for name in told)
    return Check("ok", f"all {len(here)} in their ranges: {shown}, ...")


def _package_faults(needed: Requirement) -> Iterator[str]:
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        yield f"{needed.name} is missing (needed: {needed.specifier})"
        return
    if not needed.specifier.contains(found, prereleases=True):
        yield f"{needed.name} is {found} (needed: {needed.specifier})"


def processor(config: RunConfig) -> Check:
    """The CPU, and how much of it torch uses."""
    import torch

    threads, found = torch.get_num_threads(), cores()
    told = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    told += f", threads: {threads} on {found} cores"
    if threads > found:
        hint = f"export OMP_NUM_THREADS={found}"
        return Check("warning", f"{told}: they wait for each other", hint)
    return Check("ok", told)


def gpus(config: RunConfig) -> Check:
    """The GPUs that torch can use; failed where the run wants one and there is none."""
    import torch

    from hyimg_cli.parallel.devices import gpu_count

    wanted, build = precision(config.model)[0], f"torch {torch.__version__}"
    count = gpu_count()
    if not count and wanted == "cuda":
        found = f"no GPU that {build} (CUDA {torch.version.cuda or 'not built in'}) can use"
        found += _hidden()
        hint = "install a torch build for this driver, or run with --device cpu"
        return Check("failed", f"{found}, and the run wants one{_driver()}", hint)
    if not count:
        return Check("ok", f"none{_hidden()}; {build} runs on the CPU")
    processes = config.parallel.of_session * config.parallel.replicas
    if wanted == "cuda" and count < processes:
        hint = "ask for fewer ranks or replicas, or show more GPUs (CUDA_VISIBLE_DEVICES)"
        found = f"{processes} processes want a GPU each; {build} finds {count}{_hidden()}"
        return Check("failed", found, hint)
    told = "; ".join(_gpu(index) for index in range(count)) + _hidden()
    return Check("ok", f"{told}; {build}, CUDA {torch.version.cuda}{_driver()}")


def _gpu(index: int) -> str:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    room = f"{bytes_text(free)} of {bytes_text(total)} free"
    return f"{torch.cuda.get_device_name(index)}, capability {major}.{minor}, {room}"


def _hidden() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f", CUDA_VISIBLE_DEVICES is {visible!r}"


def _driver() -> str:
    """The driver's version as its own tool tells it; nothing where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ", driver does not answer"
    return f", driver {done.stdout.split()[0]}" if done.stdout.strip() else ""


def hub(config: RunConfig) -> Check:
    """How checkpoints would be fetched. Of a token only that there is one is told."""
    from huggingface_hub import constants, get_token

    where = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "online"
    token = "a token is set" if get_token() else "no token"
    return Check("ok", f"{where}, {token}")
