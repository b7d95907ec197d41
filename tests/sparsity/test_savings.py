"""What masks save, of the optimizer's state and on the wire; what a plan says of it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.assembly.sparse import left_out_in
from shoal.memory.tracker import model_state
from shoal.planning.memory_advice import predictor_of_ranks
from shoal.planning.plan_file import written_plan
from shoal.sparsity.training import SparseTraining
from tests.ranks import TestPlace
from tests.sparsity.test_training import BASE, KINDS, LAYOUTS, SUM_ORDER, masked
from tests.sync.steps import gap, opened, train
from tests.verification.layouts import corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    corpus(folder)
    return folder


def packed(kind: str, layout: str = "") -> dict[str, Any]:
    tables = LAYOUTS[layout][1] if layout else {}
    return masked(kind, **tables, sparsity=KINDS[kind] | {"packed_state": True})


PACKED = [("magnitude", "replicate"), ("rigl", "ZeRO-3"), ("top_kast", "ZeRO-1"), ("l0", "pipeline")]


@pytest.mark.slow
@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(("kind", "layout"), PACKED)
def test_packed_state_is_that_of_trained_weights_and_changes_no_bit(
    ranks, folder: Path, kind: str, layout: str
) -> None:
    """Of all that is saved. What is held falls with the share of weights that are trained."""
    world, tables = LAYOUTS[layout]
    dense = ranks(world, train, masked(kind, **tables), str(folder))[0]
    found = ranks(world, train, packed(kind, layout), str(folder))[0]
    assert found.state.keys() == dense.state.keys()
    assert all(torch.equal(found.state[name], tensor) for name, tensor in dense.state.items())
    share = KINDS[kind].get("trained", KINDS[kind]["density"])
    for held, whole in ranks(world, moments_held, packed(kind, layout), str(folder)):
        assert held / whole == pytest.approx(share, abs=0.02)


def moments_held(place: TestPlace, tables: dict[str, Any], folder: str) -> tuple[int, int]:
    """Bytes that this rank holds of both moments of masked layers after ten steps of AdamW, and those of the layers."""
    run = opened(place, tables, folder, Path(folder) / "held")
    with closing(run.feed()) as feed:
        for step in range(1, 11):
            run.step(step, feed.next().microbatches, lr=0.01)
    (sparse,), (optimizer,) = left_out_in(run.state), run.state.optimizers
    assert isinstance(sparse, SparseTraining)
    parameters = [own.parameter for own in sparse.owners.owned]
    held = model_state(run.model, [optimizer]).optimizer_bytes
    others = [p for group in optimizer.param_groups for p in group["params"] if all(p is not q for q in parameters)]
    apart = sum(slot.nbytes for p in others for slot in optimizer.state[p].values())
    counters = sum(optimizer.state[p]["step"].nbytes for p in parameters)
    return held - apart - counters, sum(2 * p.nbytes for p in parameters)


COUNTED = [
    ("rigl", {"packed_state": True}, 1e-3),
    ("rigl", {}, 1e-3),
    ("top_kast", {"packed_state": True}, 1e-3),
    ("l0", {"schedule": {"begin": 2, "end": 12}}, 1e-3),
    ("rigl", {"packed_state": True, "layers": None}, 0.04),
]


@pytest.mark.parametrize(("kind", "keys", "within"), COUNTED)
def test_a_plan_counts_the_state_that_is_held(
    ranks, folder: Path, kind: str, keys: dict[str, Any], within: float
) -> None:
    """And masks, and what kinds keep beside them. Without names of layers norms count as masked."""
    table = KINDS[kind] | {"layers": ["blocks.*.weight"], "distribution": "uniform"} | keys
    table = {key: value for key, value in table.items() if value is not None}
    planned, held = ranks(1, planned_and_held, BASE | {"sparsity": table}, str(folder))[0]
    assert planned == pytest.approx(held, rel=within)


def planned_and_held(place: TestPlace, tables: dict[str, Any], folder: str) -> tuple[float, int]:
    """Bytes of the optimizer's state and all that masks keep: of the plan, and after three steps of AdamW."""
    run = opened(place, tables, folder, Path(folder) / "held")
    predictor = predictor_of_ranks(run.run_file)
    (one,) = predictor.footprints(written_plan(run.run_file, predictor.cluster))
    with closing(run.feed()) as feed:
        for step in range(1, 4):
            run.step(step, feed.next().microbatches, lr=0.01)
    (sparse,), (optimizer,) = left_out_in(run.state), run.state.optimizers
    assert isinstance(sparse, SparseTraining)
    counters = sum(slots["step"].nbytes for slots in optimizer.state.values())
    return one.optimizer, model_state(run.model, [optimizer]).optimizer_bytes - counters + sparse.held_bytes


def test_packed_state_goes_on_from_a_dense_one_and_back(ranks, folder: Path, tmp_path: Path) -> None:
    """In every bit: a checkpoint holds both alike."""
    corpus(tmp_path)
    wanted = ranks(1, train, masked("rigl"), str(folder))[0]
    for first, last, tables in [(0, 4, masked("rigl")), (4, 7, packed("rigl")), (7, 12, masked("rigl"))]:
        found = ranks(1, train, tables, str(tmp_path), first, last, "to and fro")[0]
    assert all(torch.equal(found.state[name], tensor) for name, tensor in wanted.state.items())


def test_replicas_send_the_gradients_of_kept_weights_alone(ranks, folder: Path) -> None:
    """At density 0.1 the masked layers' bytes are a tenth; a step that changes masks by gradients sends all."""
    wide = {"kind": "mlp", "inputs": 16, "hidden": [256, 256, 256], "outputs": 61}
    data = {"kind": "python", "build": "tests.sparsity.test_savings:random_classes"}
    table = {"kind": "rigl", "density": 0.1, "layers": ["*.weight"], "schedule": {"every": 4, "end": 10}}
    tables = BASE | {"model": wide, "data": data, "sparsity": table, "layout": {"replicate": 2}}
    packed = ranks(2, train, tables, str(folder))[0]
    dense = ranks(2, train, tables | {"sparsity": table | {"packed": False}}, str(folder))[0]
    assert packed.sent[1] / dense.sent[1] < 0.13
    assert packed.sent[3] > dense.sent[1]
    assert gap(packed.weights, dense.weights) < SUM_ORDER


def random_classes() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, generator=generator), int(n % 61)) for n in range(256)]
