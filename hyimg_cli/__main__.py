"""`python -m hyimg_cli` is `hyimg`."""

import signal


def main() -> None:
    """The console script. Ctrl-C while modules load ends it without a traceback of imports."""
    had_traceback = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if had_traceback:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hyimg_cli.cli import app

    if had_traceback:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()


if __name__ == "__main__":
    main()
