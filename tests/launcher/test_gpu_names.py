"""The driver's names of GPUs, from an invented /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launcher import devices as module
from shoal.launcher.devices import gpu_names


def test_a_name_for_each_gpu_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nameless where the driver shows none."""
    monkeypatch.setattr(module, "gpus", lambda environ: 2)
    for number in range(3):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   44\n")
    assert gpu_names({}, tmp_path) == ("NVIDIA H200", "NVIDIA H200")
    assert gpu_names({}, tmp_path / "nowhere") == (module.NAMELESS, module.NAMELESS)
