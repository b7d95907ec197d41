"""The script of a run as a command, and the run of it up to its call of Shoal in a process that only reads data.

Ranks are started by running the script again. A reader process does the same to get at the data that the script
hands over: it runs the script until that call, which raises `Reached` instead of training. So data sets need not be
pickled, and may be of classes that the script itself defines.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import RunEnded, UsageError, UserCodeError

READS_FOR = "SHOAL_READS_FOR"
"""The run directory of the run that this process reads data for."""


class Reached(BaseException):
    """The script came to the call that this process was started for. `data` is what the call was given.

    No error, and so not an `Exception`, which scripts catch.
    """

    def __init__(self, data: Any) -> None:
        super().__init__("the script came to its call of Shoal")
        self.data = data


def own_command() -> list[str]:
    """The command that starts this very script again. Raises `UsageError` where there is no script."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    script = getattr(main, "__file__", None)
    if script is None or not os.path.exists(script):
        raise UsageError(
            "ranks and reader processes are started by running the script again, and there is no script here (a "
            "notebook, a prompt or standard input); put the call into a file, or start the process under torchrun"
        )
    return [sys.executable, os.path.abspath(script), *sys.argv[1:]]


def reads_for(directory: Path, environ: Mapping[str, str]) -> bool | None:
    """Whether this process reads data for the run of that directory; None: it reads for none, and goes on."""
    wanted = environ.get(READS_FOR)
    return None if wanted is None else wanted == str(directory.resolve())


def data_given(command: Sequence[str], directory: Path, environ: MutableMapping[str, str]) -> Any:
    """Runs the script of `command` (see `own_command`) up to its call for the run of `directory`: the call's data.

    Raises:
        UserCodeError: the script ends before it.
        Exception: what the script raises.
    """
    environ[READS_FOR] = str(directory.resolve())
    module = command[1] == "-m"
    sys.argv = [command[1 + module], *command[2 + module :]]
    try:
        if module:
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[1], run_name="__main__")
    except Reached as reached:
        return reached.data
    except RunEnded:
        raise
    except SystemExit as ended:
        why = f"ended with exit code {ended.code}"
    else:
        why = "came to its end"
    raise UserCodeError(
        f"a reader process ran {sys.argv[0]} again, which {why} without the call that trains into {directory}: what "
        "leads to the call must not depend on time or chance"
    )
