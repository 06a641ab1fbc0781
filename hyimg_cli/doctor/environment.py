"""Check Python, package versions, the processors that torch can use, and the kernels.

To find which weight formats have kernels, the engine chooses one for a tiny layer of each.
"""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, metadata, requires
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hyimg_cli import __version__
from hyimg_cli.doctor.check import Check
from hyimg_cli.errors import MachineError, installed_version
from hyimg_cli.journal.keys import precision
from hyimg_cli.journal.provenance import cores, cpu_name
from hyimg_cli.settings.run import QUANTIZATIONS, Quantization, RunConfig
from hyimg_cli.spec.compilers import COMPILER_HINT, compiler_lacks
from hyimg_cli.spec.units import bytes_text

if TYPE_CHECKING:
    import torch

OURS = "hyimg-cli"
_UNKNOWN = "hyimg is not installed as a package, so the versions it needs are unknown"
_INSTALL = "pip install hyimg-cli in a fresh environment"
_EXPERTS, _WIDTH = 1, 64


def python(config: RunConfig) -> Check:
    """Check Python's version against the package's requirement."""
    found = f"Python {platform.python_version()}, hyimg {__version__}"
    try:
        wanted = SpecifierSet(metadata(OURS)["Requires-Python"])
    except PackageNotFoundError:
        return Check("warning", f"{found}; {_UNKNOWN}", _INSTALL)
    if not wanted.contains(platform.python_version(), prereleases=True):
        return Check("failed", f"{found}; expected {wanted}", "use a supported Python")
    return Check("ok", f"{found} (needed: {wanted})")


def packages(config: RunConfig) -> Check:
    """Check the version of each required package against the range in hyimg's metadata."""
    try:
        needed = [Requirement(text) for text in requires(OURS) or ()]
    except PackageNotFoundError:
        return Check("warning", _UNKNOWN, _INSTALL)
    here = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    versions = {one.name: installed_version(one.name) for one in here}
    faults = [
        f"{one.name} is {found or 'missing'} (needed: {one.specifier})"
        for one in here
        if not (found := versions[one.name]) or not one.specifier.contains(found, prereleases=True)
    ]
    if faults:
        hint = "pip install --upgrade hyimg-cli brings the versions it needs"
        return Check("failed", "; ".join(faults), hint)
    told = ("torch", "transformers", "diffusers")
    shown = ", ".join(f"{name} {versions[name]}" for name in told)
    return Check("ok", f"all {len(here)} in their ranges: {shown}, ...")


def processor(config: RunConfig) -> Check:
    """Report the CPU, and how much of it torch uses."""
    import torch

    threads, found = torch.get_num_threads(), cores()
    told = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    told += f", threads: {threads} on {found} cores"
    if threads > found:
        hint = f"export OMP_NUM_THREADS={found}"
        return Check("warning", f"{told}: threads wait for each other", hint)
    return Check("ok", told)


def gpus(config: RunConfig) -> Check:
    """Report the GPUs that torch can use; failed if the run needs one and none is found."""
    import torch

    from hyimg_cli.parallel.devices import gpu_count

    wanted, build = precision(config.model)[0], f"torch {torch.__version__}"
    count = gpu_count()
    if not count and wanted == "cuda":
        found = (
            f"{build} (CUDA {torch.version.cuda or 'not built in'}) finds no GPU that it can use"
        )
        found += _hidden()
        hint = "install a torch build for this driver, or run with --device cpu"
        return Check("failed", f"{found}, but the run needs one{_driver()}", hint)
    if not count:
        return Check("ok", f"none{_hidden()}; {build} runs on the CPU")
    processes = config.parallel.of_session * config.parallel.replicas
    if wanted == "cuda" and count < processes:
        hint = "use fewer processes or replicas, or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
        found = f"{processes} processes need one GPU each; {build} finds {count}{_hidden()}"
        return Check("failed", found, hint)
    told = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        room = f"{bytes_text(free)} of {bytes_text(total)} free"
        told.append(f"{torch.cuda.get_device_name(index)}, capability {major}.{minor}, {room}")
    found = f"{'; '.join(told)}{_hidden()}; {build}, CUDA {torch.version.cuda}{_driver()}"
    return Check("ok", found)


def _hidden() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f", CUDA_VISIBLE_DEVICES is {visible!r}"


def _driver() -> str:
    """Return the driver's version from nvidia-smi; empty if that is not installed."""
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
    """Report how checkpoints would be downloaded, and whether a token is set."""
    from huggingface_hub import constants, get_token

    where = "off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "on (not contacted)"
    token = "a token is set" if get_token() else "no token"
    return Check("ok", f"downloads are {where}, {token}")


def kernels(config: RunConfig) -> Check:
    """Check each quantization for kernels, and name the optional packages that they use."""
    import torch

    (kind, _), chosen = precision(config.model), config.model.quantization
    device = torch.device(kind if kind == "cpu" or torch.cuda.is_available() else "cpu")
    found, missing = [], ""
    for form in QUANTIZATIONS:
        try:
            found.append(f"{form}: {_choice(form, device)}")
        except MachineError as error:
            found.append(f"{form}: {error.what}")
            missing = error.hint if form == chosen else missing
    optional = {name: installed_version(name) for name in ("triton", "bitsandbytes")}
    names = (f"{name} {number}" if number else f"no {name}" for name, number in optional.items())
    told = f"on {device.type}: {'; '.join(found)} ({', '.join(names)})"
    if missing:
        return Check("failed", told, missing)
    if device.type == "cpu":
        return Check("ok", told)
    if optional["triton"] is None:
        return Check("warning", told, "install triton; without it experts run slower")
    if lacking := compiler_lacks():
        hint = f"{COMPILER_HINT}; without it Triton's kernels are not used, and experts run slower"
        return Check("warning", f"{told}; {lacking}", hint)
    return Check("ok", told)


def _choice(form: Quantization, device: "torch.device") -> str:
    """Return the text on a quantization. Raises MachineError if it has no kernel here."""
    import torch

    from hyimg_cli.kernels.choice import experts_of
    from hyimg_cli.kernels.formats import Stack, empty_stack

    def stack(rows: int) -> Stack:
        if form == "none":
            return torch.empty(_EXPERTS, rows, _WIDTH, device=device)
        return empty_stack(form, _EXPERTS, rows, _WIDTH, device)

    experts_of((stack(2 * _WIDTH), stack(_WIDTH)))
    return "works"
