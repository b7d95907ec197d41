"""Verbs that take a script in the place of a run file: train, submit, profile, rehearse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.assembly.finished_run import intent_of
from shoal.cli.arguments import become_script, command_of_script
from shoal.errors import UsageError, UserCodeError
from shoal.launcher.own_script import DESCRIBES, EXPECTS, KEYS, divided, names_no_shoal
from shoal.submit.job import Resources, job_of
from tests import programs
from tests.waiting import HANG_S

HEAD = """
import sys
import shoal, torch
from torch import nn
torch.manual_seed(0)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
x = torch.randn(256, 8)
train = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
"""
TRAIN = """
config = {"run": {"name": "taken", "steps": steps, "processes": 2}, "batch": {"global_samples": 16}}
shoal.train(config, model=model, data=train)
"""
START = """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = shoal.start(
    {"run": {"name": "kept", "processes": 2}}, model=model, optimizer=optimizer, data=train, batch_samples=16,
    steps=steps,
)
for x, y in run.batches():
    run.backward(nn.functional.cross_entropy(run.model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""


def script_in(folder: Path, body: str) -> Path:
    (folder / "mine.py").write_text(HEAD + body)
    return folder / "mine.py"


def test_keys_are_told_from_a_script_s_own_arguments() -> None:
    given = ["run.steps=5", "--epochs", "3", "lr=0.1", "data.files=['a']", "optimizer.groups.*.lr=1"]
    keys, own = divided(given)
    assert keys == ["run.steps=5", "data.files=['a']", "optimizer.groups.*.lr=1"]
    assert own == ["--epochs", "3", "lr=0.1"]


@pytest.mark.parametrize(("body", "name"), [(TRAIN, "taken"), (START, "kept")])
def test_a_script_says_which_run_it_trains_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, name: str
) -> None:
    """With keys on top and its own arguments, whichever loop it has; nothing is left behind in this process."""
    monkeypatch.chdir(tmp_path)
    argv = sys.argv
    found = command_of_script(script_in(tmp_path, body), ["batch.global_samples=32", "70"])
    assert found is not None
    assert (found.run_file.run.name, found.run_file.run.steps) == (name, 70)
    assert found.run_file.batch.global_samples == 32
    assert found.arguments == ("70",)
    assert json.loads(found.environ[KEYS]) == ["batch.global_samples=32"]
    assert not (tmp_path / "runs").exists()
    assert not {KEYS, DESCRIBES} & set(os.environ)
    assert sys.argv is argv


def test_a_job_runs_the_script_on_every_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = command_of_script(script_in(tmp_path, TRAIN), [])
    assert found is not None
    from dataclasses import replace

    job = replace(job_of(found.run_file, Resources(1, 2), file="mine.py", folder=tmp_path), script=("mine.py", "70"))
    *_, launch, ranks, two, directory, _, script, argument = job.host_command("unused", directory="D", python="python")
    assert (launch, ranks, two, directory) == ("launch", "--ranks-per-node", "2", "--directory")
    assert (script, argument) == ("mine.py", "70")


def test_a_script_without_a_call_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"mine\.py came to its end without a call of shoal\.train or"):
        command_of_script(script_in(tmp_path, ""), [])
    with pytest.raises(UsageError, match="is missing"):
        command_of_script(tmp_path / "absent.py", [])
    assert command_of_script(tmp_path / "run.toml", []) is None


def test_a_script_that_never_names_shoal_is_found(tmp_path: Path) -> None:
    """It would train without Shoal, and say nothing. What imports a module beside it may call Shoal there."""
    file = tmp_path / "plain.py"
    file.write_text("import torch\nprint(torch.zeros(1))\n")
    assert names_no_shoal(file)
    (tmp_path / "mine").mkdir()
    (tmp_path / "other.py").touch()
    for text in ("import shoal\n", "from mine import loop\n", "def main():\n    import other\n"):
        file.write_text(text)
        assert not names_no_shoal(file), text


def test_a_file_beside_the_script_that_hides_a_package_is_named(tmp_path: Path) -> None:
    """Before the script is run, which would end with an error of that file's."""
    script = script_in(tmp_path, START)
    (tmp_path / "numpy.py").touch()
    with pytest.raises(UsageError, match=r"numpy\.py has the name of the package numpy"):
        command_of_script(script, [])


def test_a_module_of_a_package_is_no_script(tmp_path: Path) -> None:
    """Its relative imports would end in Python's own error; beside no package they are not meant."""
    script = script_in(tmp_path, START)
    script.write_text("from .net import build\n")
    with pytest.raises(ImportError):
        command_of_script(script, [])
    (tmp_path / "__init__.py").touch()
    name = tmp_path.name
    with pytest.raises(UsageError, match=rf"\(from \.net import build\).* python -m {name}\.mine, or import by"):
        command_of_script(script, [])


def shoal(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.stress
@pytest.mark.parametrize("body", [TRAIN, START])
def test_a_script_is_profiled(tmp_path: Path, body: str) -> None:
    """Its own steps, on every rank; its run directory is not touched."""
    script_in(tmp_path, body)
    done = shoal(tmp_path, "profile", "mine.py", "--steps", "8", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert rank["step_s"] > 0
        assert 0 < rank["communication_s"] < rank["step_s"]
    assert "AdamW" in (tmp_path / "profile.json").read_text()
    assert not (tmp_path / "runs").exists()


@pytest.mark.stress
def test_a_script_has_a_flame_graph(tmp_path: Path) -> None:
    """Of the rank that is named, in the script's own lines; of one that is not there a sentence."""
    if not Path(sys.executable).with_name("py-spy").is_file() and shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed: pip install 'shoal[profile]'")
    slow = START.replace("    optimizer.step()\n", "    optimizer.step()\n    sum(range(200000))\n")
    script_in(tmp_path, slow)
    given = ("profile", "mine.py", "--steps", "3", "--flame", "flame.svg", "--flame-rank")
    done = shoal(tmp_path, *given, "1", "--json", "--", "400")
    if done.returncode == 3 and "--cap-add SYS_PTRACE" in done.stderr:
        pytest.skip("this host lets no process look into another: --cap-add SYS_PTRACE")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["flame"] == "flame.svg"
    assert "&lt;module&gt; (mine.py" in (tmp_path / "flame.svg").read_text()
    absent = shoal(tmp_path, *given, "2")
    assert absent.returncode == 2
    assert "--flame-rank is 2, and the ranks are 0 to 1: name one of them" in absent.stderr


def test_train_becomes_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own arguments stand behind it; keys and flags are told by the variable that its call reads."""
    became: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environ: became.append((command, environ)))
    file = script_in(tmp_path, START)
    become_script(file, ["run.steps=3", "--epochs", "2"], {"HOME": "/h"}, flags=["--fresh"])
    ((command, environ),) = became
    assert not capsys.readouterr().err
    assert command == [sys.executable, str(file), "--epochs", "2"]
    assert environ["HOME"] == "/h"
    monkeypatch.setenv(KEYS, environ[KEYS])
    assert intent_of(["batch.micro_samples=2"]) == ("fresh", ["batch.micro_samples=2", "run.steps=3"])
    with pytest.raises(UsageError, match="give one of them"):
        intent_of(["--resume"])
    assert environ[EXPECTS] == str(os.getpid())
    file.write_text("print()")
    become_script(file, [], {})
    assert EXPECTS not in became[1][1]
    assert "mine.py never names shoal, so nothing of Shoal takes part" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("import shoal\nif False: shoal.train('run.toml')\n", 0, "came to its end without a call of shoal.train or"),
        pytest.param("import shoal\nshoal.train({'run': {'nam': 'x'}})\n", 2, "run.nam", marks=pytest.mark.slow),
        pytest.param("import shoal\nraise ValueError('its own')\n", 1, "its own", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_never_comes_to_its_call_says_so(script: str, code: int, said: str, tmp_path: Path) -> None:
    """And one that has called Shoal, or has raised, says what went wrong there, and nothing else."""
    (tmp_path / "mine.py").write_text(script)
    done = programs.run(["-m", "shoal", "train", "mine.py"], cwd=tmp_path, timeout_s=HANG_S)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert ("without a call" in done.stderr) is (code == 0)


@pytest.mark.stress
def test_keys_and_flags_reach_a_script_that_is_trained(tmp_path: Path) -> None:
    """`shoal train mine.py`: keys, --fresh and the script's own arguments; as `python mine.py` it trains that run."""
    script_in(tmp_path, START.replace('"processes": 2', '"processes": 1'))
    for flags, name in (((), "kept"), (("--fresh",), "kept-2")):
        done = shoal(tmp_path, "train", "mine.py", *flags, "observe.report=false", "3")
        assert done.returncode == 0, done.stderr
        assert "[run]" in (said := (tmp_path / "runs" / name / "run.toml").read_text())
        assert "steps = 3" in said
        assert "report = false" in said


@pytest.mark.stress
@pytest.mark.parametrize("body", [TRAIN, START])
def test_a_script_is_rehearsed(tmp_path: Path, body: str) -> None:
    """A kill in a collective, and before and after an update: it ends as the undisturbed run does, to the bit."""
    script_in(tmp_path, body)
    done = shoal(tmp_path, "rehearse", "mine.py", "--faults", "rank,optimizer", "--only", "kill", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 7
    assert [(row["state"], row["kept"], row["struck_step"] is not None) for row in rows] == [
        ("bitwise", True, True)
    ] * 7
    assert not (tmp_path / "runs").exists()
