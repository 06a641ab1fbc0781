"""Commands of hyimg that this version does not have: refused by name, never ignored."""

from collections.abc import Sequence

from hyimg_cli.errors import UsageError

COMMANDS = ("serve",)


def refuse(arguments: Sequence[str]) -> None:
    """Raises UsageError where the command line asks for something this version does not have."""
    if arguments and arguments[0] in COMMANDS:
        raise UsageError(
            f"hyimg {arguments[0]} is not part of this version yet",
            hint="this version has: generate, check, plan, cache, bench, eval, doctor, info, "
            "replay",
            code="usage.not-yet",
        )
