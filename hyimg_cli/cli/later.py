"""Commands and flags of hyimg that this version does not have: refused by name, never ignored."""

from collections.abc import Sequence

from hyimg_cli.errors import UsageError

COMMANDS = ("serve",)
FLAGS = (
    "--gpu-memory-utilization",
    "--enable-cpu-offload",
)


def refuse(arguments: Sequence[str]) -> None:
    """Raises UsageError where the command line asks for something this version does not have."""
    if arguments and arguments[0] in COMMANDS:
        raise _not_yet(
            f"hyimg {arguments[0]}",
            "this version has: generate, check, plan, cache, bench, eval, doctor, info, replay",
        )
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for argument in options:
        flag = argument.split("=", 1)[0]
        if flag in FLAGS:
            raise _not_yet(flag, "leave it out; hyimg generate --help lists the flags there are")


def _not_yet(name: str, hint: str) -> UsageError:
    return UsageError(f"{name} is not part of this version yet", hint=hint, code="usage.not-yet")
