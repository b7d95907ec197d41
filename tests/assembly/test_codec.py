"""Training with a codec, end to end: bytes, checkpoints, other worlds."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.assembly.coding import coded_exchanges
from shoal.assembly.objects import UserObjects
from shoal.assembly.run import open_run
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded import Coded
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import Mesh, Ranks
from shoal.errors import ConfigError, UsageError
from shoal.gradients.residuals import PREFIX
from shoal.launcher.environment import Place
from shoal.topology.layout import Layout
from shoal.verification.verify import verify_rank
from tests.assembly.journey import Leg, travel
from tests.ranks import TestPlace
from tests.verification.layouts import GPT, corpus, run_file_of

STEPS = 4
ROUNDING = 1e-6
"""Of float32 sums of residuals, relative to the largest."""
TOP_K, SIGN = {"kind": "top_k", "fraction": 0.05}, {"kind": "sign"}
INT4, RANDOM = {"kind": "blockwise", "bits": 4}, {"kind": "random_k"}
DGC = {"kind": "dgc", "fraction": 0.02, "warmup_steps": 6}
POWER = {"kind": "power_sgd", "rank": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("codecs")
    corpus(folder)
    return folder


def tables(codec: dict[str, Any], layout: dict[str, int], zero: int | None = None) -> dict[str, Any]:
    buckets = {"bucket_bytes": 40_000, "first_bucket_bytes": 10_000}
    memory = {} if zero is None else {"memory": {"zero": zero}}
    return {"model": GPT, "codec": codec, "layout": layout, "gradients": buckets, **memory}


def by_priority(codec: dict[str, Any], replicas: int) -> dict[str, Any]:
    """A run whose partitions leave by priority. Matrices of 32 x 32 are cut into two."""
    partitions = {"schedule": "priority", "partition_bytes": 3000, "credit_bytes": 2000}
    return tables(codec, {"replicate": replicas}) | {
        "gradients": partitions,
        "wire": {"check_collectives": False},  # refused beside the second thread of a schedule by priority
        "optimizer": {"kind": "adamw", "lr": 2e-3, "clip_norm": float("inf")},
    }


def momenta(kind: str, layout: dict[str, int], **keys: int) -> dict[str, Any]:
    """A run whose optimizer sends its momentum."""
    return tables({"kind": "none"}, layout) | {"optimizer": {"kind": kind, **keys}}


def residuals(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum over sources of every parameter's residual."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX).partition("/")[2]
            found[name] = found.get(name, torch.zeros(value.shape, dtype=torch.float64)) + value.double()
    return found


CASES = {
    "replicate, top-k": (2, tables(TOP_K, {"replicate": 2})),
    "replicate, summed on the way": (2, tables(RANDOM, {"replicate": 2})),
    "replicate, random numbers": (2, tables({"kind": "terngrad"}, {"replicate": 2})),
    "replicate, two shots": (4, tables(INT4, {"replicate": 4})),
    "replicate, two rounds": (2, tables(POWER, {"replicate": 2})),
    "velocities": (2, tables(DGC, {"replicate": 2}) | {"optimizer": {"kind": "sgd", "lr": 0.1}}),
    "priority, gathered": (3, by_priority(TOP_K, 3)),
    "priority, two shots": (4, by_priority(INT4 | {"rounding": "stochastic", "block": 128}, 4)),
    "priority, two rounds": (2, by_priority(POWER, 2)),
    "priority, velocities": (2, by_priority(DGC, 2) | {"optimizer": {"kind": "sgd", "lr": 0.1}}),
    "momenta, 1-bit Adam": (2, momenta("one_bit_adam", {"replicate": 2}, exact_steps=3)),
    "momenta, one rank": (1, momenta("one_bit_adam", {}, exact_steps=3)),
    "momenta, 1-bit LAMB": (2, momenta("one_bit_lamb", {"replicate": 2}, exact_steps=3)),
    "momenta, 0/1 Adam of pieces": (
        4,
        momenta("zero_one_adam", {"replicate": 2, "shard": 2}, variance_updates=2),
    ),
    "ZeRO-1": (4, tables(TOP_K, {"replicate": 2, "shard": 2}, 1)),
    "ZeRO-2": (4, tables(SIGN, {"replicate": 2, "shard": 2}, 2)),
    "ZeRO-3": (4, tables(TOP_K, {"replicate": 2, "shard": 2}, 3)),
    "pipeline": (4, tables(SIGN, {"replicate": 2, "pipeline": 2})),
    "context": (4, tables(INT4, {"replicate": 2, "context": 2})),
}


@pytest.mark.slow
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_same_run(ranks, folder: Path, case: str) -> None:
    """Stopped in the middle and gone on, every tensor of the state has the same bits: weights, moments, residuals."""
    world, choice = CASES[case]
    name = case.replace(" ", "-")
    straight: Leg = ranks(world, travel, choice, str(folder), f"{name}-straight", 2 * STEPS)[0]
    legs = [ranks(world, travel, choice, str(folder), f"{name}-stopped", STEPS)[0] for _ in range(2)]
    assert legs[0].losses + legs[1].losses == straight.losses
    assert legs[1].left.keys() == straight.left.keys()
    differing = [key for key, value in straight.left.items() if not torch.equal(value, legs[1].left[key])]
    assert differing == []
    if world > 1 and choice["codec"]["kind"] != "terngrad":
        assert any(value.any() for value in residuals(straight.left).values())


WORLDS = [
    ("4 to 3", 4, tables(TOP_K, {"replicate": 4}), 3, tables(SIGN, {"replicate": 3})),
    ("2 to 4", 2, tables(TOP_K, {"replicate": 2}), 4, tables(SIGN, {"replicate": 4})),
    ("by priority, 4 to 3", 4, by_priority(TOP_K, 4), 3, by_priority(SIGN, 3)),
    ("priority to shards", 4, by_priority(TOP_K, 4), 4, tables(SIGN, {"replicate": 2, "shard": 2}, 3)),
    ("shards to priority", 4, tables(TOP_K, {"replicate": 2, "shard": 2}, 1), 3, by_priority(SIGN, 3)),
    ("replicas to shards", 4, tables(TOP_K, {"replicate": 4}), 4, tables(SIGN, {"replicate": 2, "shard": 2}, 3)),
    ("shards to replicas", 4, tables(TOP_K, {"replicate": 2, "shard": 2}, 1), 3, tables(SIGN, {"replicate": 3})),
    ("stages to replicas", 4, tables(TOP_K, {"replicate": 2, "pipeline": 2}), 2, tables(SIGN, {"replicate": 2})),
]


@pytest.mark.slow
@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("case", WORLDS, ids=lambda case: case[0].replace(" ", "-"))
def test_the_sum_of_residuals_is_kept_when_the_world_changes(ranks, folder: Path, case: tuple) -> None:
    """Whoever holds them, and however many: what was not sent still adds up to the same."""
    name, world_1, tables_1, world_2, tables_2 = case
    name = f"world-{name.replace(' ', '-')}"
    here = ranks(world_1, travel, tables_1, str(folder), name, STEPS)[0]
    there = ranks(world_2, travel, tables_2, str(folder), name, STEPS)[0]
    left, came = residuals(here.left), residuals(there.came)
    assert left.keys() == came.keys()
    for parameter, wanted in left.items():
        assert wanted.any(), parameter
        assert torch.allclose(came[parameter], wanted, rtol=0, atol=ROUNDING * float(wanted.abs().max())), parameter


def test_one_process_sends_what_was_left(ranks, folder: Path) -> None:
    """Gone on alone, the first update has all residuals in it, and nothing is left."""
    ranks(2, travel, tables(TOP_K, {"replicate": 2}), str(folder), "alone", STEPS)
    leg = ranks(1, travel, tables(TOP_K, {}), str(folder), "alone", 1)[0]
    assert residuals(leg.left) == {}
    again = ranks(2, travel, tables(TOP_K, {"replicate": 2}), str(folder), "alone", 1)[0]
    assert not any(value.any() for value in residuals(again.came).values())


def test_residuals_are_not_dropped_in_silence(ranks, folder: Path) -> None:
    """A run without a codec does not go on from a checkpoint that holds residuals."""
    ranks(2, travel, tables(TOP_K, {"replicate": 2}), str(folder), "dropped", STEPS)
    for codec in ({"kind": "none"}, {"kind": "sign", "feedback": False}):
        outcomes = ranks.outcomes(2, travel, tables(codec, {"replicate": 2}), str(folder), "dropped", 1)
        assert not any(worked for worked, _ in outcomes)
        assert all(UsageError.__name__ in said and "top_k" in said for _, said in outcomes)


def bytes_of_steps(place: TestPlace, choice: dict[str, Any], folder: str) -> tuple[list[int], list[float]]:
    """Bytes that this rank sent in each step, and the losses."""
    run_file = run_file_of(Path(folder), **choice, wire={"check_collectives": False})
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    run = open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)
    with closing(run.feed()) as feed:
        results = [run.step(step, feed.next().microbatches, lr=2e-3) for step in range(1, 4)]
    return [result.bytes_sent for result in results], [result.loss for result in results]


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize(("codec", "times"), [(TOP_K, 10), (SIGN, 20), (INT4, 6), (RANDOM, 5), (POWER, 4)])
def test_the_ledger_shows_fewer_bytes(ranks, folder: Path, codec: dict[str, Any], times: float) -> None:
    """As many times fewer as the codec says; and the loss of the first step, before any update, is the same."""
    layout = {"replicate": 2}
    plain, losses = ranks(2, bytes_of_steps, tables({"kind": "none"}, layout), str(folder))[0]
    coded, lossy = ranks(2, bytes_of_steps, tables(codec, layout), str(folder))[0]
    assert all(ours * times < theirs for ours, theirs in zip(coded, plain, strict=True)), (coded, plain)
    assert lossy[0] == losses[0]
    assert lossy != losses


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_codecs_of_matrices_find_them_under_zero(ranks, folder: Path, zero: int) -> None:
    """ZeRO leaves matrices whole for them: they save most of what a sparse codec saves between replicas."""
    layout = {"replicate": 2, "shard": 2}

    def sent(codec: dict[str, Any]) -> int:
        large = {"gradients": {"bucket_bytes": 1_000_000, "first_bucket_bytes": 1_000_000}}  # pieces of equal size
        legs = ranks(4, bytes_of_steps, tables(codec, layout, zero) | large, str(folder))
        return sum(sum(steps) for steps, _ in legs)

    plain, sparse, thin = sent({"kind": "none"}), sent(TOP_K), sent(POWER)
    assert plain - thin > 0.7 * (plain - sparse) > 0


def verify_with(place: TestPlace, choice: dict[str, Any], folder: str, forget: bool) -> list[str] | None:
    """What does not hold in three steps, by quantity; `forget`: rank 0 drops what it kept back after the first."""
    run_file = run_file_of(Path(folder), **choice)
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    kept_back = Coded.kept_back
    if forget and place.rank == 0:
        Coded.kept_back = lambda self: None if self.rounds > 1 else kept_back(self)
    try:
        verdict = verify_rank(run_file, here, UserObjects(), steps=3, exact=False, store=place.store)
    finally:
        Coded.kept_back = kept_back
    if verdict is None:
        return None
    assert any("error feedback" in note for note in verdict.notes)
    return [finding.quantity for finding in verdict.findings if not finding.holds]


PROVED = {
    "top-k": (2, tables(TOP_K, {"replicate": 2})),
    "sign, two shots": (4, tables(SIGN, {"replicate": 4})),
    "top-k by priority": (2, by_priority(TOP_K, 2)),
    "4 bits by priority, two shots": (4, by_priority(INT4, 4)),
    "PowerSGD by priority": (2, by_priority(POWER, 2)),
    "PowerSGD under ZeRO-3": (4, tables(POWER, {"replicate": 2, "shard": 2}, 3)),
    "random-k, ZeRO-1": (4, tables(RANDOM, {"replicate": 2, "shard": 2}, 1)),
    "4 bits, pipeline": (4, tables(INT4, {"replicate": 2, "pipeline": 2})),
    "ACP-SGD, context": (4, tables({"kind": "acp_sgd", "rank": 2}, {"replicate": 2, "context": 2})),
}


@pytest.mark.slow
@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("case", PROVED)
def test_verify_proves_that_what_was_sent_and_kept_is_the_gradient(ranks, folder: Path, case: str) -> None:
    """With each codec and layout; what is not counted is noticed."""
    world, choice = PROVED[case]
    assert ranks(world, verify_with, choice, str(folder), False)[0] == []
    assert "gradient" in ranks(world, verify_with, choice, str(folder), True)[0]


@pytest.mark.parametrize("codec", [DGC, {"kind": "qsgd"}, {"kind": "sign", "feedback": False}], ids=repr)
def test_verify_says_what_it_cannot_prove(ranks, folder: Path, codec: dict[str, Any]) -> None:
    """Codecs that keep nothing back, or no gradients."""
    choice = tables(codec, {"replicate": 2}) | {"optimizer": {"kind": "sgd", "lr": 0.1}}
    for worked, said in ranks.outcomes(2, verify_with, choice, str(folder), False):
        assert not worked
        assert ConfigError.__name__ in said
        assert "codec.kind" in said


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_a_choice_is_refused_where_a_rank_has_an_accelerator(tmp_path: Path, device: str) -> None:
    """As with `run.device = "auto"` on a host with GPUs; a named codec is not."""

    def never(ranks: Ranks, lane: str) -> Collective:
        raise AssertionError("nothing is sent")

    def exchanges(kind: str) -> object:
        run_file = run_file_of(tmp_path, codec={"kind": kind})
        mesh = Mesh(Layout(), 0, torch.device(device), 0, Ledger(), never)
        return coded_exchanges(run_file, mesh, None)

    with pytest.raises(ConfigError, match=rf'codec\.kind = "auto" on {device}: it measures processors'):
        exchanges("auto")
    assert exchanges("sign") is not None
