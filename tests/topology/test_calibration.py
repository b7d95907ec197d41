"""Fits of a calibration are told apart by dtype and hosts; files from before there were dtypes load."""

from __future__ import annotations

import msgspec

from shoal.topology.calibration import Calibration, CollectiveFit

OLD = {"backend": "shm", "operation": "all_reduce", "ranks": 2, "alpha_s": 1e-5, "beta_s": 1e-9, "sizes": 8}


def _fit(dtype: str, beta_s: float, hosts: int = 1) -> CollectiveFit:
    return CollectiveFit(**{**OLD, "beta_s": beta_s}, dtype=dtype, hosts=hosts)


def test_fits_of_two_dtypes_stand_beside_each_other() -> None:
    """The fit is that of float32 on one host unless another dtype is asked for."""
    first = Calibration(machine="a", torch="2", collectives=(_fit("float32", 1e-9),))
    newer = Calibration(machine="a", torch="2", collectives=(_fit("bfloat16", 2e-9), _fit("float32", 3e-9, hosts=2)))
    both = newer.joined(first)
    assert both.fit("shm", "all_reduce", 2) == _fit("float32", 1e-9)
    assert both.fit("shm", "all_reduce", 2, dtype="bfloat16") == _fit("bfloat16", 2e-9)
    assert both.fit("shm", "all_reduce", 2, dtype="int64") is None


def test_a_fit_without_a_dtype_is_of_float32() -> None:
    old = msgspec.convert({"machine": "a", "torch": "2", "collectives": [OLD]}, Calibration)
    assert old.collectives == (_fit("float32", 1e-9),)
