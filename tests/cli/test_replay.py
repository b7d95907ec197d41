"""`shoal replay`: the step at which a real run failed, computed again on one process."""

from __future__ import annotations

import json

import pytest

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


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run of two ranks that failed at the step that has sample 17."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "own.py").write_text(OWN + PICKY)
    (folder / "run.toml").write_text(RUN.replace("own:model", "own:picky"))
    own = Project(folder)
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
    """Neither the environment's tokens nor the run's own."""
    import zipfile

    with zipfile.ZipFile(failed.folder / "runs/own/capsule.zip") as archive:
        names = archive.namelist()
        environment = json.loads(archive.read("facts.json"))["provenance"]["environment"]
    assert not [name for name in environment if "TOKEN" in name or "SECRET" in name or "KEY" in name]
    assert not [name for name in names if "token" in name]
