"""`shoal` and `python -m shoal`: Ctrl-C ends the process without a traceback, even while its modules are imported.

When the verb is done, the process leaves without the interpreter's teardown. There, Python 3.11 to 3.13 ends a daemon
thread wherever it is, and one that is inside C++ (in a call to the store, or a kernel) takes the process along by
`std::terminate` (python/cpython#87135). A signal that comes then does not change the exit code.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

from shoal.errors import UsageError
from shoal.installation import hidden_package
from shoal.standard_output import keep_for_json


def main() -> None:
    """The `shoal` command."""
    keep_for_json(sys.argv[1:])
    if (hidden := hidden_package(sys.path)) is not None:
        print(f"shoal: {hidden}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shoal.cli.main import main as run
    from shoal.launcher.signals import end_with

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        end_with(code)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends the process: what was registered for the end is done, and what was printed is out."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    mpi: Any = sys.modules.get("mpi4py.MPI")  # which ends MPI in the teardown that does not come
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a reader that has left, as `head` does; a closed stream
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
