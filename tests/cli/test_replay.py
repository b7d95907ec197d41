"""`shoal replay`: the step at which a real run failed, computed again on one process."""

from __future__ import annotations

import json
import tomllib
import zipfile

import pytest

from shoal.experiments.capsule_replay import changing
from shoal.runfile.load import run_file_of
from tests.cli.project import OWN, RUN, Project

PICKY = """

class Picky(Logging):
    # Fails on sample 17, whichever rank has it.
    def forward(self, x):
        if self.training and bool(((x[:, 0] * SAMPLES).round() == 17).any()):
            raise ArithmeticError("sample 17 is not to my taste")
        return super().forward(x)


def picky():
    return Picky()
"""


PLANTED = "planted-7b1f"


class WithToken(Project):
    """A shell with a secret in its environment."""

    def environ(self, **more: str) -> dict[str, str]:
        return super().environ(TORCH_TOKEN=PLANTED, **more)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run of two ranks that failed at the step that has sample 17."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "own.py").write_text(OWN + PICKY)
    text = RUN.replace("own:model", "own:picky") + f'webhook = "http://127.0.0.1:1/?key={PLANTED}"\n'
    (folder / "run.toml").write_text(text)
    own = WithToken(folder)
    done = own.shoal("train", "run.toml")
    assert done.returncode == 1
    assert "capsule: runs/own/capsule.zip" in done.stderr
    return own


def test_the_step_fails_in_the_same_way(failed: Project) -> None:
    """The same error at the same step, the samples of the step by their numbers, and equal losses before it."""
    done = failed.shoal("replay", "runs/own/capsule.zip", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"] is True
    assert found["error"] == "ArithmeticError: sample 17 is not to my taste"
    assert 17 in found["sample_ids"]
    assert len(found["sample_ids"]) == 5
    for step in found["steps"]:
        assert step["loss"] == pytest.approx(step["recorded"], rel=1e-5)


def test_code_that_was_mended_does_not_fail(failed: Project) -> None:
    """Exit 6 and a sentence: the failure does not repeat itself."""
    source = (failed.folder / "own.py").read_text()
    (failed.folder / "own.py").write_text(source.replace("== 17", "== 1700"))
    done = failed.shoal("replay", "runs/own/capsule.zip")
    (failed.folder / "own.py").write_text(source)
    assert done.returncode == 6, done.stderr
    assert "does not fail on one process" in done.stdout


def test_no_secret_is_in_a_capsule(failed: Project) -> None:
    """Neither the environment's nor the run file's, in any of its files."""
    with zipfile.ZipFile(failed.folder / "runs/own/capsule.zip") as archive:
        names = archive.namelist()
        holding = [name for name in names if PLANTED.encode() in archive.read(name)]
        environment = json.loads(archive.read("facts.json"))["provenance"]["environment"]
    assert PLANTED in (failed.folder / "runs/own/run.toml").read_text(), "the run file of the run has the planted key"
    assert holding == []
    assert "OMP_NUM_THREADS" in environment, "the environment is recorded"


def test_a_refused_start_leaves_the_capsule(failed: Project) -> None:
    """Exit 2 before the first step: the capsule is that of the failure before."""
    path = failed.folder / "runs/own/capsule.zip"
    before = path.read_bytes()
    done = failed.shoal("train", "run.toml", 'model.build="own:nobody"')
    assert done.returncode == 2, done.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", []),
        ('[sync]\nkind = "allreduce"\n', []),
        ('[codec]\nkind = "blockwise"\n', ["codec"]),
        ('[hooks]\nafter_step = ["own:f"]\n', ["hooks"]),
    ],
)
def test_what_changes_the_numbers_is_known(text: str, named: list[str]) -> None:
    """A codec and hooks do; one process repeats the sum of several."""
    plain = run_file_of(tomllib.loads(RUN), file="run.toml")
    assert changing(run_file_of(tomllib.loads(RUN + text), file="run.toml"), plain) == named
