"""Hooks by name in the run file, and losses over outputs that are mappings and dataclasses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import tomli_w

from tests import programs
from tests.assembly.hook_functions import HEARD
from tests.verification.layouts import corpus, verified

ROOT = Path(__file__).parents[2]
HERE = "tests.assembly.hook_functions"


def trained(folder: Path, *, hooks: dict[str, list[str]]) -> subprocess.CompletedProcess[str]:
    """Three steps of a small model, with an evaluation and a save after the second."""
    corpus(folder)
    tables = {
        "run": {"name": "hooks", "steps": 3, "directory": str(folder / "run"), "processes": 1},
        "model": {"kind": "python", "build": f"{HERE}:scorer", "arguments": {"mapping": True}},
        "data": {"kind": "tokens", "path": str(folder / "tokens.bin"), "dtype": "uint8"},
        "batch": {"global_samples": 4, "sequence": 8},
        "loss": {"kind": "python", "build": f"{HERE}:score_loss"},
        "checkpoint": {"every_steps": 2},
        "observe": {"evaluate_every_steps": 2},
        "hooks": hooks,
    }
    (folder / "run.toml").write_text(tomli_w.dumps(tables))
    arguments = ["-m", "shoal", "train", str(folder / "run.toml")]
    return programs.run(arguments, cwd=ROOT, env=os.environ | {HEARD: str(folder / "heard")})


def test_hooks_hear_steps_evaluations_and_saves_and_add_measurements(tmp_path: Path) -> None:
    """Each in its order, with the values recorded, among them those of the hook before."""
    names = [f"{HERE}:weight_norm", f"{HERE}:note"]
    done = trained(tmp_path, hooks={"after_step": names, "after_save": names[1:], "after_evaluation": names[1:]})
    assert done.returncode == 0, done.stderr
    heard = [line.split() for line in (tmp_path / "heard").read_text().splitlines()]
    steps = [int(step) for _, step, *values in heard if "weight/norm" in values]
    saves = [int(step) for _, step, *values in heard if not values or "loss/eval" in values]
    assert steps == [1, 2, 3]
    assert set(saves) == {2, 3}
    events = [json.loads(line) for line in (tmp_path / "run/events/rank-00000.jsonl").read_text().splitlines()]
    assert sum("weight/norm" in event["values"] for event in events) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [("breaks", "no more after 1"), ("returns_text", "it must be a number"), ("absent", "has no function 'absent'")],
)
def test_a_hook_that_fails_is_named(tmp_path: Path, name: str, words: str) -> None:
    """With its key and step, exit code 2's kin: the user's own line, not a traceback of Shoal's."""
    done = trained(tmp_path, hooks={"after_step": [f"{HERE}:{name}"]})
    assert done.returncode != 0
    assert words in done.stderr
    assert "hooks.after_step" in done.stderr
    assert "engine/loop.py" not in done.stderr


@pytest.mark.parametrize("mapping", [True, False])
def test_a_loss_over_a_mapping_or_a_dataclass_is_that_of_one_process(ranks, tmp_path: Path, mapping: bool) -> None:
    """Over replicas and pieces of ZeRO-3."""
    corpus(tmp_path)
    tables = {
        "model": {"kind": "python", "build": f"{HERE}:scorer", "arguments": {"mapping": mapping}},
        "loss": {"kind": "python", "build": f"{HERE}:score_loss"},
        "layout": {"shard": 2},
    }
    verdict, *_ = ranks(2, verified, tables, str(tmp_path), True, 1)
    assert verdict["holds"], verdict["sentence"]
