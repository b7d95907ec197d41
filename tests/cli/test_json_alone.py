"""Under `--json`, standard output holds one JSON object and nothing else, whatever libraries and users' code print."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.project import Project, project
from tests.waiting import HANG_S

CHATTER = '''
import importlib.abc, os, sys

class Chatter(importlib.abc.MetaPathFinder):
    """Prints, from Python and past it, whenever one of these is imported: as libraries do that log on import."""

    def find_spec(self, name, path, target=None):
        if name in {"typer", "msgspec", "numpy", "torch", "rich", "safetensors", "tomli_w", "torch.distributed"}:
            print("[INFO] chatter of", name)
            os.write(1, b"[INFO] more of it\\n")

sys.meta_path.insert(0, Chatter())
'''
GPT = """
[run]
name = "gpt"
steps = 4
[model]
kind = "gpt"
vocabulary = 256
width = 16
layers = 2
heads = 2
[data]
kind = "stdlib"
[batch]
global_samples = 4
sequence = 16
[optimizer]
lr = 0.01
"""
SWEEP = """
name = "chatter"
run = "run.toml"
objective = "loss/train"
seeds = [0]
parallel = 1
[search]
kind = "grid"
[parameters]
"optimizer.lr" = [0.1]
"""
FEDERATED = """
[run]
name = "rounds"
steps = 1
[model]
kind = "mlp"
inputs = 64
hidden = []
outputs = 10
[data]
kind = "digits"
[batch]
global_samples = 16
[optimizer]
kind = "sgd"
lr = 0.1
[federated]
kind = "fedavg"
clients = 2
"""
VERBS = {
    "evaluate": "evaluate runs/own",
    "checkpoint export": "checkpoint export runs/own out.safetensors",
    "verify": "verify run.toml --steps 1 run.processes=2",
    "doctor": "doctor",
    "checkpoint ls": "checkpoint ls runs/own",
    "checkpoint verify": "checkpoint verify runs/own",
    "checkpoint diff": "checkpoint diff runs/own runs/own",
    "diff": "diff runs/own runs/own",
    "plan": "plan gpt.toml",
    "simulate": "simulate gpt.toml",
    "profile": "profile run.toml run.processes=1",
    "split": "split run.toml",
    "rehearse": "rehearse run.toml run.processes=2 --faults save",
    "ensemble": "ensemble run.toml run.processes=1 run.steps=2 --members 2",
    "reproduce": "reproduce runs/own",
    "sweep": "sweep sweep.toml",
    "federate simulate": "federate simulate federated.toml",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run that has trained, in a folder whose interpreters chatter; the user's own module prints as well."""
    made = project(tmp_path_factory.mktemp("chatter"))
    done = made.shoal("train", "run.toml", "run.steps=2", "run.processes=1")
    assert done.returncode == 0, done.stderr
    (made.folder / "own.py").write_text("print('a script that prints')\n" + (made.folder / "own.py").read_text())
    (made.folder / "sweep.toml").write_text(SWEEP)
    (made.folder / "gpt.toml").write_text(GPT)
    (made.folder / "federated.toml").write_text(FEDERATED)
    (made.folder / "noise").mkdir()
    (made.folder / "noise/sitecustomize.py").write_text(CHATTER)
    return made


def shoal(made: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`shoal ...` in a new interpreter, whose imports all chatter."""
    environ = made.environ(PYTHONPATH=str(made.folder / "noise"))
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(
        command, cwd=made.folder, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False
    )


@pytest.mark.slow
@pytest.mark.matrix(first=2)
@pytest.mark.parametrize("verb", VERBS)
def test_standard_output_is_one_json_object(trained: Project, verb: str) -> None:
    """The chatter is on standard error."""
    done = shoal(trained, *VERBS[verb].split(), "--json")
    assert done.returncode in (0, 6), done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert "chatter of torch" in done.stderr or "chatter of msgspec" in done.stderr


@pytest.mark.slow
def test_without_json_nothing_moves(trained: Project) -> None:
    """What people read stays on standard output, and so does a script's own `--json`."""
    done = shoal(trained, "checkpoint", "ls", "runs/own")
    assert "step        2" in done.stdout
    (trained.folder / "script.py").write_text("import sys\nprint('mine', sys.argv[1:])\n")
    done = shoal(trained, "launch", "-n", "1", "script.py", "--json")
    assert "mine ['--json']" in done.stdout, done.stderr
