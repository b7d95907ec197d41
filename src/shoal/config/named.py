"""What a run file names as "package.module:function": found, and its mistakes told apart from Shoal's."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from shoal.errors import UserCodeError

GIVEN = "given:object"
"""What stands in the run file for an object that a script passed."""


def find_named(name: str, *, key: str, what: str = "function") -> Callable[..., Any]:
    """The function, or `what` else is called, `name` ("package.module:function"); `key` is where it was named. Raises
    `UserCodeError`.
    """
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
            f"{key} = {name!r}: module '{module_name}' has no {what} '{function_name}'; it has: {there}"
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
