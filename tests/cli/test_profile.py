"""`shoal profile` as a command: its object, its timeline, and what it says without py-spy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.project import project


@pytest.mark.stress
def test_profile_says_where_the_time_goes(tmp_path: Path) -> None:
    """One object on standard output; a timeline with events of both ranks; a rank that is not there is refused."""
    own = project(tmp_path)
    keys = ("run.toml", "run.processes=2", "--steps", "2", "--warmup", "1", "--trace", "out.json", "--json")
    done = own.shoal("profile", *keys)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["bottleneck"]["sentence"]
    assert found["trace"] == "out.json"
    assert found["flame"] is None
    timeline = json.loads((tmp_path / "out.json").read_text())
    assert {event["pid"] for event in timeline["traceEvents"]} >= {0, 1}


def test_a_flame_graph_without_py_spy_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 3, and what to install."""
    from shoal.errors import MissingExtra
    from shoal.observe.profile.flame import flame_program

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MissingExtra, match=r"\[profile\]"):
        flame_program()
