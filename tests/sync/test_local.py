"""`sync.kind = "local"`: replicas take steps of their own and agree every few steps."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from shoal.assembly.job import build_job
from shoal.checkpoint.save import SaveReport
from shoal.engine import loop
from shoal.errors import ConfigError
from shoal.observe.sink import Sinks
from shoal.runfile.rules import check_across
from tests.ranks import TestPlace
from tests.sync.steps import ADAM, SGD, STEPS, SUM_ORDER, Tables, gap, opened, train
from tests.verification.layouts import corpus, run_file_of

AVERAGE = {"kind": "local", "period": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
DILOCO = {"kind": "local", "period": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    corpus(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"replicate": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_averaging_after_every_step_is_all_reduce(ranks, folder: Path, layout: Tables) -> None:
    """With plain SGD the mean of steps is the step of the mean; replicas have equally many tokens here."""
    size = 2 * layout.get("shard", 1)
    tables = SGD | {"layout": layout, "batch": {"global_samples": 4 * size, "denominator": "samples"}}
    local, *_ = ranks(size, train, tables | {"sync": AVERAGE}, str(folder))
    plain, *_ = ranks(size, train, tables, str(folder))
    assert gap(local.weights, plain.weights) < SUM_ORDER


def test_replicas_agree_when_a_period_is_over(ranks, folder: Path) -> None:
    """Every fourth step, and after the last one."""
    found, *_ = ranks(2, train, ADAM | {"sync": DILOCO | {"period": 5}}, str(folder))
    assert found.agreed == [step % 5 == 0 or step == STEPS for step in range(1, STEPS + 1)]


def test_an_agreement_a_period_sends_less(ranks, folder: Path) -> None:
    """A twelfth of the bytes of gradients, and a little for counting."""
    sync = DILOCO | {"period": STEPS, "outer_momentum": 0.0}
    local, *_ = ranks(2, train, ADAM | {"sync": sync}, str(folder))
    plain, *_ = ranks(2, train, ADAM, str(folder))
    assert sum(local.sent) < 1.2 * sum(plain.sent) / STEPS


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("layout", [{"replicate": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_a_run_goes_on_bitwise(ranks, folder: Path, layout: Tables) -> None:
    """Each replica's moments, the outer momentum and the parameters are those of the run that was not interrupted."""
    size, name = 2 * layout.get("shard", 1), f"run-{len(layout)}"
    tables = ADAM | {"layout": layout, "sync": DILOCO, "batch": {"global_samples": 2 * size}}
    whole, *_ = ranks(size, train, tables, str(folder))
    ranks(size, train, tables, str(folder), 0, 8, name)
    resumed, *_ = ranks(size, train, tables, str(folder), 8, STEPS, name)
    assert resumed.state.keys() == whole.state.keys()
    assert {"sync/momentum/head.weight", "replica-1/optimizer/exp_avg/head.weight"} <= whole.state.keys()
    assert all(torch.equal(tensor, whole.state[key]) for key, tensor in resumed.state.items())


def leaves_last(place: TestPlace, folder: str) -> bool:
    """Whether rank 1, which hears later that the last checkpoint counts, had heard of it when this rank left."""
    heard, left = Path(folder) / "heard", Path(folder) / "left"
    with ExitStack() as stack:
        run = opened(place, ADAM | {"sync": DILOCO}, folder, Path(folder) / "end", steps=2)
        sinks = stack.enter_context(Sinks())
        job = build_job(run, Path(folder) / "end", sinks, stack, stop_requested=lambda: False)
        stack.callback(job.saver.close)
        own_wait = job.saver.wait

        def hears_late(timeout_s: float = math.inf) -> list[SaveReport]:
            reports, end = own_wait(timeout_s), time.monotonic() + 0.5
            while not left.exists() and time.monotonic() < end:
                time.sleep(0.01)
            heard.touch()
            return reports

        if place.rank == 1:
            job.saver.wait = hears_late
        loop.train(job)
        found = heard.exists()
        left.touch()
        run.mesh.world.barrier().wait()
    return found


def test_no_replica_leaves_before_all_know_that_the_last_checkpoint_counts(ranks, tmp_path: Path) -> None:
    """Else it takes along what they hear it by."""
    corpus(tmp_path)
    assert ranks(2, leaves_last, str(tmp_path)) == [True, True]


def test_replicas_have_moments_of_their_own(ranks, folder: Path) -> None:
    """Which a strategy that saved one of them for all would lose."""
    found, *_ = ranks(2, train, ADAM | {"sync": DILOCO}, str(folder))
    own, other = (found.state[f"replica-{number}/optimizer/exp_avg/head.weight"] for number in (0, 1))
    assert not torch.equal(own, other)


@pytest.mark.slow
@pytest.mark.parametrize("sync", [{}, DILOCO], ids=["all-reduce", "local"])
def test_other_replicas_go_on_from_it(ranks, folder: Path, sync: Tables) -> None:
    """Three replicas, or a synchronous run, take over the state of two."""
    name = f"two-{len(sync)}"
    ranks(2, train, ADAM | {"sync": DILOCO, "batch": {"global_samples": 6}}, str(folder), 0, 8, name)
    tables = ADAM | {"batch": {"global_samples": 6}} | ({"sync": sync} if sync else {})
    found, *_ = ranks(3, train, tables, str(folder), 8, STEPS, name)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found.state.values())


INT8: Tables = {"codec": {"kind": "blockwise"}}


def test_a_codec_codes_outer_gradients(ranks, folder: Path) -> None:
    """A float64 number becomes a byte and a share of a scale, and the first agreement is off by little."""
    coded, *_ = ranks(2, train, ADAM | INT8 | {"sync": DILOCO}, str(folder), 0, 4)
    plain, *_ = ranks(2, train, ADAM | {"sync": DILOCO}, str(folder), 0, 4)
    assert sum(coded.sent) < 1.1 / 8 * sum(plain.sent)
    assert 0 < gap(coded.weights, plain.weights) < 0.01
    assert "codec/residual/1/head.weight" in coded.state


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("sync", [DILOCO, {"kind": "streaming", "period": 4, "fragments": 2, "delay": 1}], ids=str)
def test_coded_outer_gradients_go_on_bitwise(ranks, folder: Path, sync: Tables) -> None:
    """With what was not sent yet of them, and the random numbers of the codec."""
    name, codec = f"coded-{len(sync)}", {"codec": {"kind": "blockwise", "rounding": "stochastic"}}
    tables = ADAM | codec | {"sync": sync}
    whole, *_ = ranks(2, train, tables, str(folder))
    ranks(2, train, tables, str(folder), 0, 8, name)
    resumed, *_ = ranks(2, train, tables, str(folder), 8, STEPS, name)
    assert resumed.state.keys() == whole.state.keys()
    assert all(torch.equal(tensor, whole.state[key]) for key, tensor in resumed.state.items())


@pytest.mark.slow
def test_an_adaptive_period_goes_on_bitwise(ranks, folder: Path) -> None:
    """It is shorter by then, and a checkpoint holds it."""
    tables = ADAM | {"sync": DILOCO | {"adapt_every": 4}}
    whole, *_ = ranks(2, train, tables, str(folder))
    ranks(2, train, tables, str(folder), 0, 8, "adaptive")
    resumed, *_ = ranks(2, train, tables, str(folder), 8, STEPS, "adaptive")
    assert whole.agreed[:6] == [False, False, False, True, False, True]
    assert resumed.agreed == whole.agreed[8:]
    assert all(torch.equal(tensor, whole.state[key]) for key, tensor in resumed.state.items())


def test_a_period_follows_the_link_on_all_ranks(ranks, folder: Path) -> None:
    """Both take the same steps, however long each of them found an agreement: steps of microseconds are few for it."""
    found = ranks(
        2, train, ADAM | {"sync": DILOCO | {"period": 2, "longest_period": 5, "wait_share": 0.01}}, str(folder)
    )
    assert found[0].agreed == found[1].agreed
    assert found[0].agreed[:2] == [False, True]
    assert found[0].agreed[2:7] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"run": {"processes": 1}}, "one replica: there is no other to agree with"),
        ({"layout": {"shard": 2}, "run": {"processes": 2}}, "one replica"),
        ({"gradients": {"schedule": "priority"}}, 'gradients.schedule = "priority"'),
        ({"precision": {"kind": "float16"}}, 'precision.kind = "float16"'),
        ({"codec": {"kind": "sign"}, "sync": {"kind": "easgd"}}, 'codec.kind = "sign" with sync.kind = "easgd"'),
    ],
)
def test_what_cannot_be_local_is_refused(tmp_path: Path, tables: Tables, words: str) -> None:
    """In a sentence, before any process starts."""
    corpus(tmp_path)
    tables = {"run": {"processes": 2}, "optimizer": {"clip_norm": None}, "sync": {"kind": "local"}, **tables}
    with pytest.raises(ConfigError, match=words):
        check_across(run_file_of(tmp_path, **tables), file="local.toml")
