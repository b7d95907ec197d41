"""A rank of `shoal launch`: arms the guards, then runs the user's script or module as Python itself would.

    python -m shoal.launcher.script SCRIPT.py ARGS        or      ... -m MODULE ARGS

The rank ends with its launcher, and leaves a record of what it failed with, whether the script knows of Shoal or not.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import TracebackType

from shoal.launcher.children import die_with_parent
from shoal.launcher.environment import place_from
from shoal.launcher.failure import FAILURE_FOLDER, report_failure


def main(arguments: list[str]) -> None:
    """Run what `arguments` name; ends the process with its exit code where that is not 0."""
    die_with_parent(os.environ)
    place = place_from(os.environ)
    if place is None:
        raise RuntimeError("a rank was started without its place: RANK and WORLD_SIZE are missing")
    with report_failure(place, Path(os.environ[FAILURE_FOLDER])):
        try:
            _run(arguments)
        except SystemExit as leaving:
            if leaving.code not in (0, None):
                raise
        except Exception as error:
            error.__traceback__ = _own_part(error.__traceback__)
            raise


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; all of it where it never came so far."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        frame = frame.tb_next
    return frame or trace


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # the folder that `-m` put there; what runs gets its own
    main(sys.argv[1:])
