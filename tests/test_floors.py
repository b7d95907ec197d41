"""What the layers contract of import-linter cannot say: no `torch.distributed` on the lower floors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent
LOWER = ("config", "topology", "maths", "schedules", "collectives", "models", "codec", "cost", "files.py", "errors.py")


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("room", LOWER)
def test_the_lower_floors_know_no_process_groups(room: str) -> None:
    """Floors 0 to 2 import no `torch.distributed`."""
    files = [SOURCE / room] if room.endswith(".py") else sorted((SOURCE / room).rglob("*.py"))
    assert files
    for path in files:
        assert not any(name.startswith("torch.distributed") for name in imports_of(path)), path


def test_the_search_finds_an_import() -> None:
    """The check has teeth: it sees the import in a room that may have it."""
    assert any(name.startswith("torch.distributed") for name in imports_of(SOURCE / "comm" / "collective.py"))
