"""The same run again is bitwise the same; what has changed since is named, and so is where two runs part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shoal.experiments.diff import environment_differences
from shoal.launcher.allocator import thresholds, variables
from shoal.observe.events import events_path
from shoal.observe.facts import facts_path, read_facts
from tests.cli.project import Project, project

TEXT = """
[run]
name = "text"
steps = 2
processes = 1
[model]
kind = "gpt"
vocabulary = 256
width = 16
layers = 1
heads = 2
[data]
kind = "tokens"
path = "tokens.bin"
dtype = "uint8"
[batch]
global_samples = 2
sequence = 16
[optimizer]
kind = "adamw"
[observe]
report = false
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished run of nine steps on two ranks."""
    own = project(tmp_path_factory.mktemp("reproduced"))
    done = own.shoal("train", "run.toml")
    assert done.returncode == 0, done.stderr
    return own


@pytest.mark.slow
def test_a_run_is_bitwise_the_same_again(trained: Project) -> None:
    """`shoal reproduce` trains it into runs/own-again: every loss and every tensor is the same; exit 0."""
    done = trained.shoal("reproduce", "runs/own", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["same"] is True
    assert found["changed"] == []
    assert found["diff"]["steps"] == 9
    assert found["diff"]["checkpoint_step"] == 9
    assert found["diff"]["tensors"]["same"] > 10
    refused = trained.shoal("reproduce", "runs/own")
    assert refused.returncode == 2
    assert "own-again exists" in refused.stderr


@pytest.mark.slow
def test_a_changed_file_and_package_are_named(trained: Project) -> None:
    """Another width of the model and a package of another version: not the same, exit 6, and both are named."""
    original = (trained.folder / "own.py").read_text()
    facts = read_facts(trained.folder / "runs/own")
    facts["provenance"]["packages"]["numpy"] = "1.0.0"
    facts_path(trained.folder / "runs/own").write_text(json.dumps(facts))
    (trained.folder / "own.py").write_text(original.replace("nn.Tanh()", "nn.ReLU()"))
    try:
        done = trained.shoal("reproduce", "runs/own", "--into", "changed")
    finally:
        (trained.folder / "own.py").write_text(original)
    assert done.returncode == 6, done.stdout + done.stderr
    assert "changed: not the same" in done.stdout
    assert "changed since: file own.py has changed" in done.stdout
    assert "changed since: package numpy was 1.0.0, is " in done.stdout
    assert "the runs part at step 1: " in done.stdout


@pytest.mark.slow
def test_two_runs_part_where_they_part(trained: Project) -> None:
    """Another learning rate from a common start: the key, the first step with another loss, and the first tensor."""
    done = trained.shoal("train", "run.toml", "optimizer.lr=0.02", "run.directory=other")
    assert done.returncode == 0, done.stderr
    found = trained.shoal("diff", "runs/own", "other", "--plot", "losses.png")
    assert found.returncode == 6
    assert "optimizer.lr: 0.01 | 0.02" in found.stdout
    assert "than rounding" not in found.stdout
    assert "the runs part at step 2: " in found.stdout  # the first loss is that of the common start
    assert "of the checkpoints of step 9, " in found.stdout
    assert (trained.folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    same = trained.shoal("diff", "runs/own", "runs/own")
    assert same.returncode == 0
    assert "bitwise the same in all 9 common steps" in same.stdout


@pytest.mark.slow
def test_rounding_is_called_rounding(trained: Project) -> None:
    """Losses that are 1e-7 apart, and from step 5 on a thousandth: the runs part at step 1, by rounding until 5."""
    shutil.copytree(trained.folder / "runs/own", trained.folder / "rounded")
    path = events_path(trained.folder / "rounded", 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "loss/train" in line["values"]:
            line["values"]["loss/train"] *= 1 + (1e-7 if line["step"] < 5 else 1e-3)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = trained.shoal("diff", "runs/own", "rounded")
    assert found.returncode == 6
    assert "the runs part at step 1: " in found.stdout
    assert "they differ by no more than rounding before step 5: " in found.stdout


@pytest.mark.slow
def test_changed_data_is_named(trained: Project) -> None:
    """A run on a file of tokens, and one on the file as it is after: `diff` and `reproduce` name the file."""
    tokens = trained.folder / "tokens.bin"
    tokens.write_bytes(bytes(range(256)) * 8)
    (trained.folder / "text.toml").write_text(TEXT)
    try:
        assert trained.shoal("train", "text.toml").returncode == 0
        assert json.loads((trained.folder / "runs/text/data.json").read_bytes())["files"].keys() == {"tokens.bin"}
        tokens.write_bytes(bytes(range(255, -1, -1)) * 8)
        done = trained.shoal("reproduce", "runs/text", "--into", "other-text")
    finally:
        tokens.unlink()
    assert done.returncode == 6, done.stdout + done.stderr
    named = "the data changed: file tokens.bin has other content"
    assert f"changed since: {named}" in done.stdout
    assert named in trained.shoal("diff", "runs/text", "other-text").stdout.splitlines()


@pytest.mark.slow
def test_a_directory_without_a_run_is_one_sentence(trained: Project) -> None:
    """`diff` and `reproduce` say what they need."""
    for verb in (("diff", "runs/own", "cache"), ("reproduce", "cache")):
        done = trained.shoal(*verb)
        assert done.returncode == 2, done.stderr
        assert "cache" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_each_difference_of_the_environment_is_a_sentence() -> None:
    """Python, commit, package, variable, file: changed, gone and new. How much freed memory a rank keeps is none: it
    follows from the number of ranks.
    """

    def kept_by(ranks: int) -> dict[str, str]:
        return variables(thresholds(8 << 30, ranks=ranks)) | {"OMP_NUM_THREADS": str(4 // ranks)}

    assert kept_by(2) != kept_by(4)
    before = {"python": "3.11", "git": {"commit": "a" * 40, "dirty": False}, "packages": {"x": "1"},
              "files": {"gone.py": "1", "own.py": "1"}, "environment": kept_by(2)}  # fmt: skip
    after = {"python": "3.12", "git": {"commit": "a" * 40, "dirty": True}, "packages": {"x": "2", "y": "1"},
             "files": {"new.py": "1", "own.py": "2"}, "environment": kept_by(4)}  # fmt: skip
    assert environment_differences(before, after) == [
        "Python was 3.11, is 3.12",
        "the repository was at aaaaaaaaaaaa, is at aaaaaaaaaaaa with changes",
        "package x was 1, is 2",
        "package y was not there, is 1",
        "environment variable OMP_NUM_THREADS was 2, is 1",
        "file gone.py is gone",
        "file new.py is new",
        "file own.py has changed",
    ]
    assert environment_differences(before, before) == []


def test_versions_of_packages_are_those_of_pythons_parser() -> None:
    from importlib.metadata import distributions

    from shoal.observe.provenance import packages

    wanted = dict(sorted((one.metadata["Name"], one.version) for one in distributions() if one.metadata["Name"]))
    assert packages() == wanted


def test_many_files_of_shoal_are_one_line() -> None:
    """Another version of Shoal is one difference; a few of its files are named."""
    before = {"python": "3.11.7", "files": {f"shoal/{n}.py": "a" for n in range(9)} | {"own.py": "a"}}
    after = {"python": "3.11.7", "files": {f"shoal/{n}.py": "b" for n in range(9)} | {"own.py": "b"}}
    assert environment_differences(before, after) == [
        "9 files of Shoal itself are others, shoal/0.py among them",
        "file own.py has changed",
    ]
    few = {"python": "3.11.7", "files": before["files"] | {"shoal/3.py": "b"}}
    assert environment_differences(before, few) == ["file shoal/3.py has changed"]


def test_secrets_are_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Variables that change numbers, and those that `submit --env` gave, are kept; of others the name alone; and of a
    secret never the value, whatever its prefix and whoever gave it."""
    from shoal.observe.provenance import provenance

    monkeypatch.chdir(tmp_path)
    secret = {"TORCH_TOKEN": "hush-hush", "CUDA_API_KEY": "hush-hush", "hf_credentials": "hush-hush"}
    proxy = {"HF_PROXY": "http://me:hush-hush@proxy:80"}
    given = {"OWN": "1", "OWN_KEY": "hush-hush", "SHOAL_RECORD": "OWN,OWN_KEY"}
    found = provenance({"OMP_NUM_THREADS": "2", "HF_HOME": "/hf", "HOME": "/root", **secret, **proxy, **given})
    kept = {"HF_HOME": "/hf", "OMP_NUM_THREADS": "2", "OWN": "1", "SHOAL_RECORD": "OWN,OWN_KEY"}
    assert found["environment"] == kept
    assert found["other_variables"] == ["CUDA_API_KEY", "HF_PROXY", "HOME", "OWN_KEY", "TORCH_TOKEN", "hf_credentials"]
    assert "hush-hush" not in json.dumps(found)
    assert found["files"]["shoal/observe/provenance.py"]
