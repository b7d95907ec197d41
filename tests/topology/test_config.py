"""The table `[layout]`."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from shoal.topology.config import LayoutConfig
from shoal.topology.layout import Layout


def test_the_table_makes_a_layout() -> None:
    """Its keys are what `Layout.for_processes` takes; a key that is not given is left to the processes."""
    assert Layout.for_processes(4, **msgspec.structs.asdict(LayoutConfig())) == Layout(replicate=4)
    assert Layout.for_processes(4, **msgspec.structs.asdict(LayoutConfig(replicate=4))) == Layout(replicate=4)


@pytest.mark.parametrize("table", [{"tensor": 2}, {"replicate": 0}, {"replicate": 2.5}, {"replicate": 1 << 21}])
def test_what_does_not_run_is_refused(table: dict[str, float]) -> None:
    """An axis that no room runs yet is an unknown key, and a size outside the bounds is no size."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, LayoutConfig)


def test_the_room_imports_no_torch() -> None:
    """A wrong layout is refused before the seconds that torch takes to import."""
    code = "import sys, shoal.topology.config, shoal.topology.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
