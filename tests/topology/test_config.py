"""The table `[layout]`."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from shoal.topology.config import LayoutConfig
from shoal.topology.layout import Layout


def test_the_table_makes_a_layout() -> None:
    """Copies that are not given are as many as the processes make."""
    assert LayoutConfig().layout(4) == Layout(replicate=4)
    assert LayoutConfig(replicate=4).layout(4) == Layout(replicate=4)
    assert LayoutConfig(tensor=2, pipeline=2).layout(8) == Layout(replicate=2, pipeline=2, tensor=2)


def test_processes_follow_from_the_axes() -> None:
    """Their product, where any is given."""
    assert LayoutConfig().default_processes is None
    assert LayoutConfig(replicate=1).default_processes == 1
    assert LayoutConfig(shard=2, context=2, expert=4).default_processes == 4


@pytest.mark.parametrize("table", [{"tensors": 2}, {"replicate": 0}, {"replicate": 2.5}, {"replicate": 1 << 21}])
def test_what_is_no_layout_is_refused(table: dict[str, float]) -> None:
    """A name that is no axis is an unknown key, and a size outside the bounds is no size."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, LayoutConfig)


def test_the_room_imports_no_torch() -> None:
    """A wrong layout is refused before the seconds that torch takes to import."""
    code = "import sys, shoal.topology.config, shoal.topology.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
