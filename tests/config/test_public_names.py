"""The rooms' public names exist, and reading the run file's tables imports no torch."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize("room", ["config", "checkpoint", "data"])
def test_every_public_name_is_there(room):
    """`__all__` is what the room gives; anything else is an `AttributeError`."""
    module = import_module(f"shoal.{room}")
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


def test_the_tables_of_a_run_file_are_read_without_torch():
    """A wrong key is refused before anything heavy is imported."""
    code = "import sys, shoal.runfile.load, shoal.config; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], env=None, check=False).returncode == 0
