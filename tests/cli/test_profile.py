"""`shoal profile` as a command: its object, its timeline, and what it says without py-spy."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.project import OWN, project


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
    from shoal.observe.profile.trace import flame_program

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MissingExtra, match=r"\[profile\]"):
        flame_program()


def require_py_spy() -> None:
    if not Path(sys.executable).with_name("py-spy").is_file() and shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed: pip install -e '.[profile]'")


BUSY = """

class Busy(Logging):
    def forward(self, x):
        return think(super().forward(x))


def think(found):
    begin = time.monotonic()
    while time.monotonic() - begin < 0.05:
        sum(range(1000))
    return found


def busy():
    return Busy()
"""


@pytest.mark.slow
def test_a_flame_graph_shows_the_function_in_which_the_rank_is(tmp_path: Path) -> None:
    """By py-spy, of the rank that is named: a function of the user's that computes in Python stands in the picture by
    its name and file, with a good part of the samples of the thread that trains; the rest is waiting for its peer."""
    require_py_spy()
    own = project(tmp_path)
    (tmp_path / "own.py").write_text(OWN + BUSY)
    keys = ("run.toml", "run.processes=2", "model.build=own:busy", "--steps", "1", "--warmup", "0", "--json")
    done = own.shoal("profile", *keys, "--flame", "flame.svg", "--flame-rank", "1")
    if done.returncode == 3 and "--cap-add SYS_PTRACE" in done.stderr:
        pytest.skip("this host lets no process look into another: --cap-add SYS_PTRACE")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["flame"] == "flame.svg"
    picture = (tmp_path / "flame.svg").read_text()
    shares = [float(share) for share in re.findall(r"think \(own\.py[^<]*samples, ([\d.]+)%\)", picture)]
    loop = [float(share) for share in re.findall(r"profile_rank \([^<]*samples, ([\d.]+)%\)", picture)]
    assert shares, picture[:2000]
    assert max(shares) > 0.2 * max(loop)


def test_a_flame_graph_of_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Exit 2, with the ranks that there are."""
    require_py_spy()
    done = project(tmp_path).shoal("profile", "run.toml", "run.processes=1", "--flame", "f.svg", "--flame-rank", "1")
    assert done.returncode == 2
    assert "--flame-rank is 1, and the ranks are 0 to 0: name one of them" in done.stderr
