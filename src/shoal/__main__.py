"""`shoal` and `python -m shoal`: Ctrl-C ends the process without a traceback, even while its modules are imported.

A signal that comes when the verb is done, in the teardown of the process, does not change its exit code.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """The `shoal` command."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shoal.cli.main import main as run
    from shoal.launch.rank_process import LAUNCHER_PID
    from shoal.launch.signals import end_with, ignore_requests

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except SystemExit as end:
        if os.environ.get(LAUNCHER_PID) == str(os.getppid()):
            ignore_requests()  # a rank: its launcher ends it if it does not leave
        else:
            end_with(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


if __name__ == "__main__":
    main()
