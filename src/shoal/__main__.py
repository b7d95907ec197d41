"""`shoal` and `python -m shoal`: Ctrl-C ends the process without a traceback, even while its modules are imported."""

from __future__ import annotations

import signal


def main() -> None:
    """The `shoal` command."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shoal.cli.main import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
