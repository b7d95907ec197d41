"""`optimizer.kind = "adamw_8bit"` in every layout: what is exact, what rounds otherwise, and what resumes."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.adamw_8bit import compare_losses
from shoal.assembly.run import Run
from shoal.codec.config import MOMENT_BLOCK as BLOCK
from shoal.codec.moments import Quantised
from shoal.elastic.state_copy import held_state, load_state
from shoal.memory.tracker import storage_bytes
from shoal.verification.layout_step import TOLERANCE
from tests.assembly.journey import LR, Leg, travel, whole_state
from tests.ranks import TestPlace
from tests.sync.steps import gap, opened, train
from tests.verification.layouts import GPT, MOE, corpus, verified

RECIPES = Path(__file__).parents[2] / "recipes"
MODEL = GPT | {"layers": 2, "width": 80, "heads": 4, "feed_forward_width": 96}
"""Matrices of 6,400 and 7,680 numbers: between tensor ranks they are cut within a block."""
EIGHT = {"optimizer": {"kind": "adamw_8bit"}, "model": MODEL}
FLOAT64 = {"precision": {"kind": "float64"}}
SAME_MATH = 1e-12
"""Losses in float64, relative (contracts.md)."""
SINGLE = 1e-5
"""Losses in float32 over 12 steps of AdamW, relative (contracts.md)."""
OTHER_BLOCKS = 2e-3
"""Losses over 12 steps whose moments were rounded in other blocks: 2e-4 was seen."""
CUT_BETWEEN_BLOCKS: dict[str, dict[str, Any]] = {
    "replicate": {"layout": {"replicate": 2}},
    "ZeRO-1": {"layout": {"shard": 2}, "memory": {"zero": 1}},
    "ZeRO-2": {"layout": {"shard": 2}, "memory": {"zero": 2}},
    "ZeRO-3": {"layout": {"shard": 2}, "memory": {"zero": 3}},
    "pipeline": {"layout": {"pipeline": 2}},
    "context": {"layout": {"context": 2}},
}
TENSOR = {"layout": {"tensor": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adamw_8bit")
    corpus(folder)
    return folder


def leg(ranks, folder: Path, tables: dict[str, Any], name: str, steps: int) -> Leg:
    world = next(iter(tables.get("layout", {"replicate": 1}).values()))
    return ranks(world, travel, EIGHT | tables, str(folder), name, steps)[0]


@pytest.fixture(scope="module")
def straight(ranks, folder: Path) -> dict[str, Leg]:
    """Twelve steps of one process, in both precisions."""
    return {p: leg(ranks, folder, t, f"straight-{p}", 12) for p, t in (("float32", {}), ("float64", FLOAT64))}


@pytest.mark.slow
@pytest.mark.parametrize("layout", CUT_BETWEEN_BLOCKS)
def test_layouts_that_cut_between_blocks_train_as_one_process(
    ranks, folder: Path, straight: dict[str, Leg], layout: str
) -> None:
    """ZeRO, replicas, pipelines and context: in float64 as exactly as AdamW, and in float32 within its tolerance."""
    tables = CUT_BETWEEN_BLOCKS[layout]
    exact = leg(ranks, folder, tables | FLOAT64, f"exact-{layout}", 12)
    assert exact.losses == pytest.approx(straight["float64"].losses, rel=SAME_MATH)
    single = leg(ranks, folder, tables, f"single-{layout}", 12)
    assert single.losses == pytest.approx(straight["float32"].losses, rel=SINGLE)


def test_a_layout_that_cuts_within_a_block_rounds_its_moments_otherwise(
    ranks, folder: Path, straight: dict[str, Leg]
) -> None:
    """Tensor ranks: the first two losses are exact, since an update is made before its moments are rounded."""
    losses = leg(ranks, folder, TENSOR | FLOAT64, "tensor", 12).losses
    assert losses[:2] == pytest.approx(straight["float64"].losses[:2], rel=SAME_MATH)
    assert losses != pytest.approx(straight["float64"].losses, rel=SAME_MATH)
    assert losses == pytest.approx(straight["float64"].losses, rel=OTHER_BLOCKS)


BY_PRIORITY = {
    "layout": {"replicate": 2},
    "gradients": {"schedule": "priority"},
    "optimizer": EIGHT["optimizer"] | {"clip_norm": float("inf")},
    "wire": {"check_collectives": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ZeRO-1", "ZeRO-2", "ZeRO-3", "replicate", "by priority"])
def test_a_run_resumes_in_every_bit(ranks, folder: Path, layout: str) -> None:
    """Six steps, a checkpoint, six more in new processes: losses, weights and moments of twelve without a stop."""
    tables = CUT_BETWEEN_BLOCKS.get(layout, BY_PRIORITY)
    whole = leg(ranks, folder, tables, f"whole-{layout}", 12)
    first, second = (leg(ranks, folder, tables, f"halves-{layout}", 6) for _ in range(2))
    assert all(torch.equal(first.left[name], tensor) for name, tensor in second.came.items())
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(second.left[name], tensor) for name, tensor in whole.left.items())


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_other_layouts(ranks, folder: Path, straight: dict[str, Leg]) -> None:
    """Between layouts that cut between blocks every bit comes over; tensor ranks round moments anew, in their own."""
    layouts = [{}, CUT_BETWEEN_BLOCKS["ZeRO-3"], CUT_BETWEEN_BLOCKS["pipeline"], TENSOR, CUT_BETWEEN_BLOCKS["ZeRO-1"]]
    legs = [leg(ranks, folder, tables | FLOAT64, "journey", 2) for tables in layouts]
    for number, (here, there) in enumerate(pairwise(legs)):
        assert here.left.keys() == there.came.keys()
        exact = number < 2
        for name, tensor in here.left.items():
            if exact or not name.startswith("optimizer/exp_avg"):
                assert torch.equal(there.came[name], tensor), (number, name)
        assert gap(there.came, here.left) <= TOLERANCE
    assert gap(legs[3].came, legs[2].left) > 0
    losses = [loss for one in legs for loss in one.losses]
    assert losses[:6] == pytest.approx(straight["float64"].losses[:6], rel=SAME_MATH)
    assert losses == pytest.approx(straight["float64"].losses[:10], rel=OTHER_BLOCKS)


LIKE_ADAMW = 0.02
"""Losses, relative: the mean of the last steps, over three seeds."""
SEEDS = (0, 1, 2)


@pytest.mark.slow
def test_losses_are_those_of_adamw(ranks, folder: Path) -> None:
    """Over sixty steps of a small GPT, from each of three seeds."""
    means = []
    for kind in ("adamw", "adamw_8bit"):
        runs = (
            leg(ranks, folder, {"run": {"seed": seed}, "optimizer": {"kind": kind}}, f"{kind}-{seed}", 60)
            for seed in SEEDS
        )
        means.append([fmean(run.losses[-10:]) for run in runs])
    assert means[1] == pytest.approx(means[0], rel=LIKE_ADAMW)
    assert means[1] != means[0]


@pytest.mark.stress
def test_losses_of_a_recipe_are_those_of_adamw() -> None:
    """A byte-level GPT of 800,000 parameters, 300 steps of text."""
    found = compare_losses(RECIPES / "stdlib-gpt.toml", seeds=len(SEEDS), steps=300)
    assert all(one["holds"] for one in found["checks"]), found


APART: dict[str, dict[str, Any]] = {
    "server": {"sync": {"kind": "server", "admission": "sync"}, "optimizer": EIGHT["optimizer"] | {"clip_norm": None}},
    "local": {"sync": {"kind": "local", "period": 2}},
    "gossip": {"sync": {"kind": "gossip"}},
    "coded": {"codec": {"kind": "blockwise"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", APART)
def test_replicas_that_agree_otherwise_resume_in_every_bit(ranks, folder: Path, strategy: str) -> None:
    """Servers that step parts of it, replicas with moments of their own, coded gradients."""
    tables = EIGHT | {"batch": {"global_samples": 8, "denominator": "samples"}} | APART[strategy]
    whole = ranks(2, train, tables, str(folder), 0, 8)[0]
    ranks(2, train, tables, str(folder), 0, 4, f"apart-{strategy}")
    resumed = ranks(2, train, tables, str(folder), 4, 8, f"apart-{strategy}")[0]
    assert any("optimizer/exp_avg/" in name for name in whole.state)
    assert resumed.state.keys() == whole.state.keys()
    assert all(torch.equal(resumed.state[name], tensor) for name, tensor in whole.state.items())


VERIFIED: dict[str, dict[str, Any]] = {
    "ZeRO-1": CUT_BETWEEN_BLOCKS["ZeRO-1"],
    "ZeRO-3": CUT_BETWEEN_BLOCKS["ZeRO-3"],
    "tensor": TENSOR,
    "pipeline": CUT_BETWEEN_BLOCKS["pipeline"],
    "experts": {"layout": {"shard": 2, "expert": 2}, "model": MOE | {"width": 64, "expert_width": 72}},
    "local": {"layout": {"replicate": 2}, "sync": {"kind": "local", "period": 2}},
    "PipeDream": {"layout": {"pipeline": 2}, "pipeline": {"schedule": "PipeDream"}},
}


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("layout", VERIFIED)
@pytest.mark.parametrize("exact", [False, True], ids=["float32", "float64"])
def test_verify_raises_no_false_alarm(ranks, folder: Path, layout: str, exact: bool) -> None:
    """Though tensor ranks round moments in other blocks, and gradients differ by last bits. A note says how."""
    verdict, *_ = ranks(2, verified, EIGHT | VERIFIED[layout], str(folder), exact, None)
    assert verdict["holds"], verdict["sentence"]
    assert any('optimizer.kind = "adamw_8bit"' in note for note in verdict["notes"])
    moments = [row for row in verdict["rows"] if row["quantity"] == "moment"]
    assert bool(moments) == (layout not in ("local", "PipeDream"))


class Held(NamedTuple):
    """Bytes of moments on a rank, and numbers whose moments they are: in 8 bits and in all."""

    bytes: int
    coded: int
    numbers: int


def take(run: Run, steps: int) -> None:
    with closing(run.feed()) as feed:
        for _ in range(steps):
            fed = feed.next()
            run.state.progress.advance(fed.interval)
            run.step(run.state.progress.step, fed.microbatches, lr=LR)


def held_bytes(place: TestPlace, tables: dict[str, Any], folder: str) -> Held:
    run = opened(place, EIGHT | tables, folder, Path(folder) / "held")
    take(run, 2)
    states = run.state.optimizer.optimizer.state
    moments = [state[name] for state in states.values() for name in ("exp_avg", "exp_avg_sq")]
    tensors = [t for m in moments for t in (m if isinstance(m, Quantised) else (m,))]
    coded = sum(m.codes.numel() for m in moments if isinstance(m, Quantised)) // 2
    return Held(storage_bytes(tensors), coded, sum(parameter.numel() for parameter in states))


@pytest.mark.parametrize("layout", ["replicate", "ZeRO-1", "ZeRO-3"])
def test_ranks_hold_a_quarter_of_the_bytes_of_adamw(ranks, folder: Path, layout: str) -> None:
    """Two bytes and two 64ths for each number of a large parameter, and eight for each of the others."""
    tables = CUT_BETWEEN_BLOCKS[layout]
    own = ranks(2, held_bytes, tables, str(folder))
    plain = ranks(2, held_bytes, tables | {"optimizer": {"kind": "adamw"}}, str(folder))
    assert sum(ours.numbers for ours in own) == sum(theirs.numbers for theirs in plain)
    for ours, theirs in zip(own, plain, strict=True):
        assert theirs.bytes == 8 * theirs.numbers
        scales = 2 * 4 * -(-ours.coded // BLOCK)
        small = 8 * (ours.numbers - ours.coded)
        assert ours.bytes - small - 2 * ours.coded == pytest.approx(scales, rel=0.05)
        assert ours.bytes / ours.numbers < 0.3 * theirs.bytes / theirs.numbers


def carried(place: TestPlace, tables: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """As a replica carries its state over to the next generation and to one that comes: names that differ."""
    first = opened(place, EIGHT | tables, folder, Path(folder) / "first")
    take(first, 3)
    second = opened(place, EIGHT | tables, folder, Path(folder) / "second")
    load_state(second.state, held_state(first.state))
    kept = [s["exp_avg"] for s in second.state.optimizer.optimizer.state.values()]
    assert any(isinstance(moment, Quantised) for moment in kept)
    for run in (first, second):
        take(run, 2)
    ours, theirs = whole_state(first), whole_state(second)
    return {name: tensor for name, tensor in ours.items() if not torch.equal(theirs[name], tensor)}


def test_a_replica_carries_its_moments_over(ranks, folder: Path) -> None:
    """The state that elastic replicas copy from each other: the copy goes on in every bit."""
    assert ranks(1, carried, {}, str(folder)) == [{}]
