"""`sync.kind = "easgd"`: replicas and a centre pull each other together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.sync.steps import ADAM, LR, SGD, STEPS, SUM_ORDER, Tables, Trained, gap, mean_of, train
from tests.verification.layouts import corpus

EASGD: Tables = {"kind": "easgd", "period": 4}
BATCH: Tables = {"batch": {"global_samples": 6, "denominator": "samples"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("easgd")
    corpus(folder)
    return folder


def conserved(trained: Trained, replicas: int) -> dict[str, Tensor]:
    """The sum of all replicas' parameters and the centre, divided by their number."""
    return mean_of([trained.weights, *(trained.own(replica) for replica in range(replicas))])


def test_pulls_without_gradients_keep_the_sum(ranks, folder: Path) -> None:
    """sum of x_i + centre stays to 1e-12, while a pull takes alpha of what two replicas differ by."""
    rates, tables = [LR] * 4 + [0.0] * 20, SGD | BATCH | {"sync": EASGD | {"beta": 0.5}}
    before, *_ = ranks(3, train, tables, str(folder), 0, 4, "", rates)
    after, *_ = ranks(3, train, tables, str(folder), 0, 24, "", rates)
    assert gap(conserved(after, 3), conserved(before, 3)) < SUM_ORDER
    assert gap(before.own(0), before.own(1)) > 1e-4, "replicas were to differ"
    left = (1 - 0.5 / 3) ** 5
    for name, own in after.own(0).items():
        apart = left * (before.own(0)[name] - before.own(1)[name])
        assert float((own - after.own(1)[name] - apart).norm() / apart.norm()) < 1e-9


@pytest.mark.slow
def test_the_first_pull_takes_the_centre_to_the_mean(ranks, folder: Path) -> None:
    """With beta = 1 the centre becomes the mean of the replicas: after one step of SGD, that of all-reduce."""
    tables = SGD | BATCH
    easgd, *_ = ranks(3, train, tables | {"sync": EASGD | {"period": 1, "beta": 1.0}}, str(folder), 0, 1)
    plain, *_ = ranks(3, train, tables, str(folder), 0, 1)
    assert gap(easgd.weights, plain.weights) < SUM_ORDER


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("layout", [{"replicate": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_a_run_goes_on_bitwise(ranks, folder: Path, layout: Tables) -> None:
    """The centre, each replica's parameters and its moments."""
    size, name = 2 * layout.get("shard", 1), f"easgd-{len(layout)}"
    tables = ADAM | {"layout": layout, "sync": EASGD, "batch": {"global_samples": 2 * size}}
    whole, *_ = ranks(size, train, tables, str(folder))
    ranks(size, train, tables, str(folder), 0, 8, name)
    resumed, *_ = ranks(size, train, tables, str(folder), 8, STEPS, name)
    assert whole.agreed == [False, False, False, True] * 3
    assert "sync/replica-1/x/head.weight" in whole.state
    assert resumed.state.keys() == whole.state.keys()
    assert all(torch.equal(tensor, whole.state[key]) for key, tensor in resumed.state.items())


@pytest.mark.slow
def test_a_synchronous_run_goes_on_from_the_centre(ranks, folder: Path) -> None:
    """And leaves the replicas' own parameters where they are."""
    tables = ADAM | BATCH
    saved, *_ = ranks(3, train, tables | {"sync": EASGD}, str(folder), 0, 8, "centre")
    resumed, *_ = ranks(2, train, tables, str(folder), 8, 9, "centre", [0.0] * STEPS)
    assert gap(resumed.weights, saved.weights) < 1e-6  # AdamW's decay has a rate of 0 too
