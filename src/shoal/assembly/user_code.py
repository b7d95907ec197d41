"""The user's own model, data and loss: found by name, called with keywords, and told apart from Shoal's mistakes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from shoal.config.check import Table, keys_of
from shoal.config.named import GIVEN, find_named, users_traceback
from shoal.data.config import PythonData
from shoal.engine.config import PythonLoss
from shoal.errors import ShoalError, UsageError, UserCodeError
from shoal.launcher.failure import is_out_of_memory
from shoal.models.config import PythonModel
from shoal.runfile.run_file import RunFile

NAMING = ("kind", "build", "arguments")
"""Keys that name what a script hands over as an object."""


OF_OBJECTS: Mapping[str, type[Table]] = {"model": PythonModel, "data": PythonData, "loss": PythonLoss}
"""The table of each object that a script can pass."""


def table_of_object(name: str, written: Any) -> Any:
    """What stands in the run file's table `name` for an object that a script passed: kind "python", with what is
    written there. Of a table of another kind, whose place the object takes, only keys that kind "python" has too.

    So a key means the same in a dictionary, in a file and on the command line.
    """
    if not isinstance(written, Mapping):
        return written
    other, known = written.get("kind", "python") != "python", keys_of(OF_OBJECTS[name])
    kept = {key: value for key, value in written.items() if key not in NAMING and (not other or key in known)}
    return {**kept, "kind": "python", "build": GIVEN}


def call_named(name: str, arguments: Mapping[str, Any], *, key: str) -> Any:
    """What the function `name` ("package.module:function") returns for `arguments`; `key` is where it was named.

    Raises `UserCodeError` where the module or the function is not there, or where it raises: with the user's own part
    of the traceback.
    """
    function = find_named(name, key=key)
    try:
        return function(**arguments)
    except ShoalError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserCodeError(f"{key} = {name!r} raised:\n{users_traceback(error)}") from None


def require_modules(run_file: RunFile, file: Path) -> None:
    """Before any rank starts. Raises `UserCodeError` where the module of a function that the run names is not found,
    and says where it lies if that is above `file`.
    """
    for table in OF_OBJECTS:
        name = getattr(getattr(run_file, table), "build", None)
        outermost = str(name).partition(":")[0].partition(".")[0]
        if name is None or name == GIVEN or _is_there(outermost, [os.getcwd(), *sys.path]):
            continue
        place = next((str(folder) for folder in file.resolve().parents if _is_there(outermost, [str(folder)])), None)
        raise UserCodeError(
            f"{table}.build = {name!r}: there is no module '{outermost}'; it is looked for in the current folder and "
            f"among the installed packages{'' if place is None else f': it is in {place}, so start the run there'}"
        )


def _is_there(module: str, folders: Sequence[str]) -> bool:
    """Whether a module of no package is in one of these folders, is imported, or is found in another way, as packages
    are that were installed to be edited.
    """
    if module in sys.modules or PathFinder.find_spec(module, folders) is not None:
        return True
    others = (finder for finder in sys.meta_path if finder is not PathFinder)
    return any(finder.find_spec(module, None) is not None for finder in others)


def require_nameable(tables: Mapping[str, Table], directory: Path) -> None:
    """Before any rank starts. Raises `UsageError` where one of the run's `tables` stands for an object of a script."""
    given = [name for name, table in tables.items() if getattr(table, "build", None) == GIVEN]
    if given:
        functions = " ".join(f"{name}.build=module:function" for name in given)
        raise UsageError(
            f"the {' and the '.join(given)} of {directory} were objects of a script, which the run directory does not "
            f"hold: name functions that make them ({functions}), or load the weights into a model of your own with "
            "shoal.load_checkpoint"
        )
