"""A calibration is kept, joined with what is newer, and begun anew on another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.planning.calibration import add_calibration, calibration_path, read_calibration
from shoal.topology.calibration import Calibration, CollectiveFit, MatrixProduct


def _fit(ranks: int, alpha_s: float) -> CollectiveFit:
    return CollectiveFit(backend="gloo", operation="all_reduce", ranks=ranks, alpha_s=alpha_s, beta_s=1e-9)


def test_newer_measurements_replace_older_ones_and_the_rest_stays(tmp_path: Path) -> None:
    path = calibration_path({"SHOAL_CACHE": str(tmp_path / "cache")})
    assert read_calibration(path) is None
    first = Calibration(machine="a", torch="2", collectives=(_fit(2, 1e-5), _fit(4, 2e-5)), memory_bytes_s=1e9)
    product = MatrixProduct(dtype="float32", m=8, n=8, k=8, ranks=2, flops_s=1e9)
    add_calibration(path, first)
    add_calibration(path, Calibration(machine="a", torch="2", collectives=(_fit(4, 3e-5),), products=(product,)))
    found = read_calibration(path)
    assert found is not None
    assert found.fit("gloo", "all_reduce", 2) == _fit(2, 1e-5)
    assert found.fit("gloo", "all_reduce", 4) == _fit(4, 3e-5)
    assert found.fit("shm", "all_reduce", 4) is None
    assert (found.products, found.memory_bytes_s) == ((product,), 1e9)


def test_a_rough_fit_does_not_replace_one_through_more_sizes(tmp_path: Path) -> None:
    path = tmp_path / "calibration.toml"
    careful = CollectiveFit(backend="gloo", operation="send", ranks=2, alpha_s=1e-5, beta_s=1e-9, sizes=8)
    rough = CollectiveFit(backend="gloo", operation="send", ranks=2, alpha_s=3e-5, beta_s=1e-9)
    add_calibration(path, Calibration(machine="a", torch="2", collectives=(careful,)))
    assert add_calibration(path, Calibration(machine="a", torch="2", collectives=(rough,))).collectives == (careful,)
    again = CollectiveFit(backend="gloo", operation="send", ranks=2, alpha_s=2e-5, beta_s=1e-9, sizes=8)
    assert add_calibration(path, Calibration(machine="a", torch="2", collectives=(again,))).collectives == (again,)


def test_another_machine_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "calibration.toml"
    add_calibration(path, Calibration(machine="a", torch="2", collectives=(_fit(2, 1e-5),)))
    add_calibration(path, Calibration(machine="b", torch="2"))
    assert read_calibration(path) == Calibration(machine="b", torch="2")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "calibration.toml"
    path.write_text('machine = "a"\ntorch = "2"\nspeed = 3\n')
    with pytest.raises(ConfigError, match=r"calibration\.toml.*speed"):
        read_calibration(path)
