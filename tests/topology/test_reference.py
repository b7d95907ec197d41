"""The written reference of the cluster file is what its tables say."""

from __future__ import annotations

from pathlib import Path

import shoal
from shoal.topology.cluster_file import reference

ROOT = Path(shoal.__file__).parents[2]


def test_the_reference_of_the_cluster_file_is_current() -> None:
    """Keys, machines, devices and failures; `python -m shoal.topology.cluster_file` writes it."""
    assert (ROOT / "docs/reference/cluster-file.md").read_text(encoding="utf-8") == reference()
