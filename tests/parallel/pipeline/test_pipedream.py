"""PipeDream equals the sequential program that uses the same stale weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from shoal.parallel.pipeline.execute import Computation, run_pipeline
from shoal.parallel.pipeline.pipedream import Stash, run_pipedream, staleness
from shoal.schedules.build import build
from tests.parallel.pipeline import chains
from tests.parallel.pipeline.test_execute import cut_model, pipeline_of
from tests.ranks import TestPlace

EXACT = 1e-12  # float64
LR, MOMENTUM, MICROBATCHES = 0.5, 0.9, 7
KINDS = ("perceptron", "recomputed")


def train(place: TestPlace, kind: str) -> dict[str, Tensor]:
    """SGD with momentum, a step for each microbatch; this rank's weights afterwards."""
    group = pipeline_of(place)
    table = build("PipeDream", ranks=group.size, microbatches=MICROBATCHES)
    model, stages = cut_model(kind, table, group.rank)
    batch = chains.data(kind, MICROBATCHES)
    moving = {weight: torch.zeros_like(weight) for weight in stages.weights(group.rank)}

    def update(stage: int, microbatch: int) -> None:
        for weight, momentum in moving.items():
            assert weight.grad is not None
            weight.sub_(momentum.mul_(MOMENTUM).add_(weight.grad), alpha=LR)  # in place, as optimizers do
            weight.grad = None

    run_pipedream(
        table,
        group,
        Computation(stages.forward, batch.loss, stages.weights),
        [model.context(i) for i in batch.inputs],
        update=update,
        run=partial(run_pipeline, device=torch.device("cpu")),
    )
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def sequential(kind: str, ranks: int, *, stale: bool = True) -> dict[str, Tensor]:
    """One process, microbatch after microbatch; every version of every weight is kept, and each forward takes the one
    that the stage had in the pipeline."""
    table = build("PipeDream", ranks=ranks, microbatches=MICROBATCHES)
    model, stages = cut_model(kind, build("1F1B", ranks=1, microbatches=1), 0)
    _, by_stage = cut_model(kind, table, 0)
    batch, behind = chains.data(kind, MICROBATCHES), staleness(table)
    parameters = dict(model.named_parameters())
    stage_of = {name: stage for stage, names in enumerate(by_stage.names) for name in names}
    history = {name: [p.detach().clone()] for name, p in parameters.items()}
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for microbatch, inputs in enumerate(batch.inputs):
        for name, p in parameters.items():
            version = behind[stage_of[name], microbatch] if stale else -1
            p.data = history[name][version].clone()
            p.grad = None
        batch.loss(stages.forward(0, None, inputs), microbatch).backward()
        for name, p in parameters.items():
            assert p.grad is not None
            momentum[name] = MOMENTUM * momentum[name] + p.grad
            history[name].append(history[name][-1] - LR * momentum[name])
    return {name: versions[-1] for name, versions in history.items()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_equal_those_of_the_stale_sequential_program(ranks, world: int) -> None:
    """Every weight after the last microbatch, with and without recomputation in the backward."""
    for kind in KINDS if world == 2 else KINDS[:1]:
        expected = sequential(kind, world)
        trained = {name: w for weights in ranks(world, train, kind, timeout_s=180) for name, w in weights.items()}
        assert trained.keys() == expected.keys()
        for name, weight in trained.items():
            assert (weight - expected[name]).norm() <= EXACT * expected[name].norm(), name


def test_staleness_is_that_of_the_paper_and_matters() -> None:
    """Stage s of S is S - 1 - s updates behind once the pipeline is full, and ends elsewhere than plain SGD."""
    versions = staleness(build("PipeDream", ranks=4, microbatches=MICROBATCHES))
    assert all(versions[stage, j] == max(0, j - (3 - stage)) for stage, j in versions)
    stale, fresh = sequential("perceptron", 4), sequential("perceptron", 4, stale=False)
    assert (stale["layers.0.weight"] - fresh["layers.0.weight"]).norm() > 1e-6


def test_versions_are_stored_once_each_and_let_go() -> None:
    """Two microbatches of one version share it; dropped versions are gone."""
    weight = torch.ones(2, requires_grad=True)
    stash = Stash([weight])
    stash.keep(0)
    stash.keep(1)
    assert stash.versions == 1
    with torch.no_grad(), stash.updating():
        weight.add_(1)
    assert stash.versions == 2
    with stash.restored(1):
        assert weight.tolist() == [1, 1]
    assert weight.tolist() == [2, 2]
    stash.drop(0)
    stash.drop(1)
    assert stash.versions == 1
