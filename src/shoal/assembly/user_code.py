"""The user's own model, data and loss: found by name, called with keywords, and told apart from Shoal's mistakes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.config.check import Table, keys_of
from shoal.data.config import PythonData
from shoal.engine.config import PythonLoss
from shoal.errors import ShoalError, UsageError, UserCodeError
from shoal.launcher.failure import is_out_of_memory
from shoal.models.config import PythonModel

GIVEN = "given:object"
"""What stands in the run file for an object that a script passed."""


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


def find_named(name: str, *, key: str) -> Callable[..., Any]:
    """The function `name` ("package.module:function"); `key` is where it was named. Raises `UserCodeError`."""
    if name == GIVEN:
        raise UserCodeError(
            f"{key}: this run was started from a script that passed its own object; start it from that script, or "
            'name a function as "package.module:function"'
        )
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise UserCodeError(f'{key} = {name!r}; write "package.module:function"')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserCodeError(
                f"{key} = {name!r}: there is no module '{error.name}'; it is looked for in the current folder and "
                "among the installed packages"
            ) from None
        raise UserCodeError(f"{key} = {name!r} cannot be imported:\n{users_traceback(error)}") from None
    except Exception as error:
        raise UserCodeError(f"{key} = {name!r} cannot be imported:\n{users_traceback(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        there = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))[:8])
        raise UserCodeError(
            f"{key} = {name!r}: module '{module_name}' has no function '{function_name}'; it has: {there}"
        )
    return function


def users_traceback(error: BaseException) -> str:
    """The traceback without the frames of this package and of the import machinery."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _ours(f.filename)]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def _ours(filename: str) -> bool:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.abspath(filename).startswith(package) or filename.startswith("<frozen")
