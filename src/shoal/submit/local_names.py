"""What a run file names relative to the folder it is submitted from: modules of the user's, and files of data.

A pod has neither that folder nor what lies in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from shoal.data.named_files import local_files
from shoal.runfile.run_file import RunFile


def local_names(run_file: RunFile, folder: Path) -> dict[str, str]:
    """File or folder by the key that needs it, of what is found in `folder`."""
    found = dict(_modules(msgspec.to_builtins(run_file), "", folder))
    data = next((name for name in local_files(run_file.data, folder) if not os.path.isabs(name)), None)
    return found | ({} if data is None else {"data": data})


def _modules(table: dict[str, Any], path: str, folder: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _modules(value, f"{path}{key}.", folder)
        elif key == "build" and isinstance(value, str):
            name = value.partition(":")[0].partition(".")[0]
            found += [(f"{path}{key}", there) for there in (f"{name}.py", name) if name and (folder / there).exists()]
    return found
