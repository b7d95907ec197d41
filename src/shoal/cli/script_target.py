"""A script in the place of a run file: `shoal submit mine.py`, `shoal profile mine.py`, `shoal rehearse mine.py`.

The script is run up to its first call of `shoal.train` or `shoal.start`, which says what run it is. Keys of the command
line reach that call by a variable; what is no key is an argument of the script.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.runfile.run_file import RunFile


@dataclass(frozen=True)
class ScriptTarget:
    """A script, with its own `arguments` and the `keys` of the command line; `run_file` is that of its run."""

    file: Path
    arguments: tuple[str, ...]
    keys: tuple[str, ...]
    run_file: RunFile

    @property
    def command(self) -> list[str]:
        """What runs it here."""
        return [sys.executable, str(self.file), *self.arguments]

    @property
    def environ(self) -> dict[str, str]:
        """The variable that tells it the keys; nothing where there are none."""
        from shoal.launch.own_script import KEYS

        return {KEYS: json.dumps(self.keys)} if self.keys else {}


def command_of_script(file: Path, given: Sequence[str]) -> ScriptTarget | None:
    """The script that `file` is, with what was `given` behind it; None for a run file. Raises `UsageError` where it is
    missing, `UserCodeError` where it makes no call of Shoal, and what the script raises.
    """
    if file.suffix != ".py":
        return None
    from shoal.errors import UsageError
    from shoal.launch.own_script import divided, run_file_of_script

    if not file.is_file():
        raise UsageError(f"{file} is missing: give a script that calls shoal.train or shoal.start, or a run file")
    keys, arguments = divided(given)
    before = sys.argv
    try:
        found = run_file_of_script([sys.executable, str(file), *arguments], keys, os.environ)
    finally:
        sys.argv = before
    return ScriptTarget(file, tuple(arguments), tuple(keys), found)
