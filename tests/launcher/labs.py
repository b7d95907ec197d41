"""Labs for tests, where this machine can play one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from shoal.errors import EnvironmentFault
from shoal.launcher.lab.lab_file import Lab, lab_from
from shoal.launcher.lab.network import network


def lab_of(links: list[dict[str, Any]] | None = None, **table: Any) -> Lab:
    """A lab file with these keys under [lab], and these [[link]] tables."""
    return lab_from({"lab": {"rate_mbit": 1000, **table}, "link": links or []}, file="lab.toml")


@cache
def why_no_lab() -> str:
    """Why this machine cannot make a lab, found by making one; empty where it can."""
    try:
        with network(lab_of(hosts=1)):
            return ""
    except EnvironmentFault as fault:
        return str(fault)


@pytest.fixture
def can_lab() -> None:
    """Skips where this machine cannot make a lab."""
    if why_no_lab():
        pytest.skip(why_no_lab())
