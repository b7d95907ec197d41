"""Ranks that hold the same part of the state hold the same bits, and a run in which they do not ends with a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shoal.engine.copies import TensorBox, difference
from shoal.errors import CorruptCheckpoint
from shoal.observe.sink import Sink, Sinks
from shoal.state import parts_of
from shoal.topology.holding import Box
from tests.assembly.training_ranks import flipped, trained
from tests.ranks import TestPlace
from tests.sync.steps import opened
from tests.verification.foreign_models import PICTURES, foreign
from tests.verification.layouts import MOE, corpus

EVERY_STEP = {"observe": {"compare_every_steps": 1}}
REPLICATE = {"layout": {"replicate": 2}}
NORMS = {"model": foreign("conv_norm", {"batch_norm": "grouped", "group_samples": 2}), "data": PICTURES}
HEAD = "model/head.weight"

EQUAL: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate": (3, {"layout": {"replicate": 3}, "batch": {"global_samples": 9}}),
    "replicate, ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    "replicate, ZeRO-3": (4, {"layout": {"replicate": 2, "shard": 2}}),
    "tensor": (4, {"layout": {"replicate": 2, "tensor": 2, "sequence_parallel": True}}),
    "pipeline": (4, {"layout": {"replicate": 2, "pipeline": 2}}),
    "context": (2, {"layout": {"context": 2}}),
    "experts": (2, {"model": MOE, "layout": {"shard": 2, "expert": 2}, "memory": {"zero": 1}}),
    "statistics": (2, REPLICATE | NORMS),
    "dropout, bfloat16": (2, REPLICATE | {"model": foreign("nested", dropout=0.1), "precision": {"kind": "bfloat16"}}),
    "codec": (2, REPLICATE | {"codec": {"kind": "sign"}}),
    "priority": (
        2,
        REPLICATE
        | {
            "gradients": {"schedule": "priority"},
            "optimizer": {"clip_norm": None},
            "wire": {"check_collectives": False},
        },
    ),
    "local": (2, REPLICATE | {"sync": {"kind": "local", "period": 2}}),
    "streaming": (2, REPLICATE | {"sync": {"kind": "streaming", "period": 4, "fragments": 2, "delay": 1}}),
    "gossip": (2, REPLICATE | {"sync": {"kind": "gossip", "meet_every": 2}}),
    "easgd": (2, REPLICATE | {"sync": {"kind": "easgd", "period": 2}}),
    "server": (2, REPLICATE | {"sync": {"kind": "server"}}),
    "hogwild": (2, REPLICATE | {"sync": {"kind": "hogwild"}, "optimizer": {"kind": "sgd", "lr": 0.01}}),
}


QUICK = ("replicate", "replicate, ZeRO-3", "tensor", "statistics", "local", "gossip", "server")


@pytest.mark.slow
@pytest.mark.matrix(every=3)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.stress) for case in EQUAL]
)
def test_copies_that_are_equal_are_never_called_different(ranks, tmp_path: Path, case: str) -> None:
    """At the start, after every step, and when the run resumes from its checkpoint."""
    size, tables = EQUAL[case]
    corpus(tmp_path)
    ranks(size, trained, tables | EVERY_STEP, str(tmp_path))
    ranks(size, trained, tables | EVERY_STEP, str(tmp_path), 8)


FLIPPED: dict[str, tuple[int, dict[str, Any], str, int, str]] = {
    "a weight": (3, {"layout": {"replicate": 3}, "batch": {"global_samples": 9}}, HEAD, 1, "rank 1 has another copy"),
    "a moment": (2, REPLICATE, "optimizer/exp_avg/head.weight", 1, "rank 0 and rank 1 have different copies"),
    "a statistic": (2, REPLICATE | NORMS, "model/flat.running_var", 1, "copies of model/flat.running_var"),
    "a norm of two tensor ranks": (2, {"layout": {"tensor": 2}}, "model/norm.weight", 0, "different copies of"),
}


@pytest.mark.parametrize("case", FLIPPED)
def test_a_flipped_bit_ends_the_run_and_names_rank_and_tensor(ranks, tmp_path: Path, case: str) -> None:
    """Before the next save, so that no checkpoint holds it."""
    size, tables, name, rank, sentence = FLIPPED[case]
    corpus(tmp_path)
    outcomes = ranks.outcomes(size, flipped, tables | EVERY_STEP, str(tmp_path), name, rank, 3)
    for worked, said in outcomes:
        assert not worked
        assert "VerificationFailed: after step" in said
        assert sentence in said
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_by_default_copies_are_compared_before_a_save(ranks, tmp_path: Path) -> None:
    """A flip at step 3 is found before the save after step 6, one at step 2 in that step, and 0 means never."""
    corpus(tmp_path)
    for step, found in ((3, 6), (2, 2)):
        outcomes = ranks.outcomes(2, flipped, REPLICATE, str(tmp_path), HEAD, 1, step)
        assert all(f"after step {found}, " in said for _, said in outcomes)
    ranks(2, flipped, REPLICATE | {"observe": {"compare_every_steps": 0}}, str(tmp_path), HEAD, 1, 2)


def test_a_rank_that_loaded_another_checkpoint_is_named_before_the_first_step(ranks, tmp_path: Path) -> None:
    """It was told of another step than its peers, or its host has another run directory."""
    corpus(tmp_path)
    ranks(2, trained, REPLICATE | {"checkpoint": {"every_steps": 3}}, str(tmp_path))
    outcomes = ranks.outcomes(2, misled, REPLICATE, str(tmp_path), "3")
    for worked, said in outcomes:
        assert not worked
        assert "VerificationFailed: rank 1 has loaded the checkpoint of step 3 (" in said
        assert "and rank 0 the checkpoint of step 6 (" in said


def misled(place: TestPlace, tables: dict[str, Any], folder: str, step: str) -> None:
    """Rank 1 hears another step than rank 0 has found."""
    from shoal.assembly.process import Process

    original = Process.announce

    def announce(self: Process, key: str, find: Any) -> str:
        said = original(self, key, find)
        return step if key.startswith("resume/") and place.rank == 1 else said

    with patch.object(Process, "announce", announce):
        trained(place, tables, folder, 9)


def test_weights_that_differ_before_the_first_step_are_named(ranks, tmp_path: Path) -> None:
    """What a rank has read is compared, not only what it was told to read."""
    corpus(tmp_path)
    ranks(2, trained, REPLICATE, str(tmp_path))
    outcomes = ranks.outcomes(2, misread, REPLICATE, str(tmp_path))
    assert all("VerificationFailed: before the first step, rank 0 and rank 1 have" in said for _, said in outcomes)


def misread(place: TestPlace, tables: dict[str, Any], folder: str) -> None:
    """One number of what rank 1 reads is another one."""
    from shoal.engine import recovery

    original = recovery.read_into

    def read_into(manifest: Any, directory: Path, tensors: Any, **options: Any) -> None:
        original(manifest, directory, tensors, **options)
        if place.rank == 1:
            parts_of(tensors)[HEAD][0].tensor.view(-1)[3].mul_(1.5)

    with patch.object(recovery, "read_into", read_into):
        trained(place, tables, folder, 9)


def test_a_checkpoint_that_one_rank_cannot_load_is_passed_over_by_all(ranks, tmp_path: Path) -> None:
    """All go on from the one before it, and rank 0 says which rank could not load what."""
    corpus(tmp_path)
    ranks(2, trained, REPLICATE | {"checkpoint": {"every_steps": 3}}, str(tmp_path))
    found = ranks(2, unreadable_on_rank_1, REPLICATE, str(tmp_path))
    assert [step for step, _ in found] == [3, 3]
    assert "rank 1 cannot load the checkpoint of step 6: " in found[0][1]
    assert "the disk of rank 1" in found[0][1]
    assert found[1][1] == ""


def unreadable_on_rank_1(place: TestPlace, tables: dict[str, Any], folder: str) -> tuple[int, str]:
    """The step that this rank goes on from, and what it says."""
    from shoal.assembly.job import restore
    from shoal.engine import recovery

    class Heard(Sink):
        def warn(self, text: str) -> None:
            said.append(text)

    original, said = recovery.read_into, []

    def read_into(manifest: Any, *others: Any, **options: Any) -> None:
        original(manifest, *others, **options)
        if (place.rank, manifest.step) == (1, 6):
            raise CorruptCheckpoint("the disk of rank 1 gives other bytes")

    with patch.object(recovery, "read_into", read_into):
        directory = Path(folder) / "run"
        run = opened(place, tables, folder, directory, 9)
        with Sinks(Heard()) as sinks:
            step = restore(run, directory, sinks)
    assert step is not None
    return step, " ".join(said)


def test_the_minority_is_named() -> None:
    """Of three copies; of two, both."""
    part, scalar = TensorBox("w", Box((0, 2), (3, 1))), TensorBox("s", Box((), ()))
    assert "rank 2 has another copy of w [0:3, 2:3] than rank 0, 1:" in difference([{part: 5}, {part: 5}, {part: 6}])
    assert "rank 0 and rank 1 have different copies of s:" in difference([{scalar: 5}, {scalar: 6}])
    odd = [{part: 5}, {part: 7}, {part: 8}, {part: 5}]
    assert "rank 1, 2 has" in difference(odd)
    found = difference([{part: 5, scalar: 1}, {part: 5, scalar: 1}, {part: 6, scalar: 2}])
    assert "(and of 1 other part)" in found
