"""`gradients.schedule = "priority"` and `gradients.bucket = "auto"` as choices of a run file: the same training."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.assembly.run import open_run
from shoal.bench.training_job import start_training, training_job
from shoal.checkpoint.commit import read_manifest
from shoal.checkpoint.load import read_all
from shoal.checkpoint.objects import Places
from shoal.engine import loop
from shoal.engine.loop import Cadence
from shoal.engine.recovery import resume
from shoal.errors import ConfigError, Stopped
from shoal.gradients.priority import PriorityGradients
from shoal.launcher.environment import Place
from shoal.runfile.rules import check_across
from tests.assembly.journey import LR, save, whole_state
from tests.ranks import TestPlace
from tests.verification.layouts import corpus, run_file_of, verified

LOSSES = 1e-5  # docs/reference/tolerances.md: trajectories in float32, the order of sums alone differs
STEPS = 8

Tables = dict[str, dict[str, Any]]
ADAM: Tables = {
    "optimizer": {"kind": "adamw", "lr": 2e-3, "clip_norm": float("inf")},
    "wire": {"check_collectives": False},  # refused beside the second thread of a schedule by priority
}
PRIORITY: Tables = ADAM | {"gradients": {"schedule": "priority", "partition_bytes": 3000, "credit_bytes": 7000}}
ORDER: Tables = ADAM | {"gradients": {"bucket_bytes": 3000, "first_bucket_bytes": 3000}}


@dataclass
class Trained:
    """Losses and norms of the steps, and the state that they led to; at rank 0."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    remembered: dict[str, Any] | None = None


def train(place: TestPlace, tables: Tables, folder: str, name: str = "", steps: int = STEPS) -> Trained:
    """`steps` steps; a run with a `name` goes on from its newest checkpoint, and is saved."""
    run_file = run_file_of(Path(folder), **tables)
    directory = Path(folder) / name
    own = msgspec.structs.replace(run_file.run, processes=place.size, directory=str(directory))
    run_file = msgspec.structs.replace(run_file, run=own)
    check_across(run_file, file="priority.toml")
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    run = open_run(run_file, here, store=place.store)
    losses, norms, progress, gradients = [], [], run.state.progress, run.generation.gradients
    if name:
        resume(run.state, directory, announce=run.process.announce, warn=print)
    with closing(run.feed()) as feed, closing(gradients):
        for _ in range(steps):
            fed = feed.next()
            progress.advance(fed.interval)
            result = run.step(progress.step, fed.microbatches, lr=LR)
            losses.append(result.loss)
            norms.append(result.norm)
        gradients.settle()
    if name:
        save(run, directory, place)
    remembered = gradients.tuned.to_state() if gradients.tuned is not None else None
    return Trained(losses, norms, whole_state(run), remembered)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("priority")
    corpus(folder)
    return folder


def same_bits(one: Trained, other: Trained) -> bool:
    return one.state.keys() == other.state.keys() and all(torch.equal(t, other.state[n]) for n, t in one.state.items())


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("tables", [{}, {"batch": {"micro_samples": 1}}, {"memory": {"recompute": "full"}}], ids=str)
def test_a_schedule_by_priority_changes_nothing(ranks, folder: Path, tables: Tables) -> None:
    """Of two ranks, whose sums have one order only, losses and all of the state are those of the plain schedule."""
    by_priority, *_ = ranks(2, train, PRIORITY | tables, str(folder))
    plain, *_ = ranks(2, train, ORDER | tables, str(folder))
    assert by_priority.losses == plain.losses
    assert same_bits(by_priority, plain)


@pytest.mark.slow
def test_two_runs_give_the_same_bits_and_the_losses_of_the_plain_schedule(ranks, folder: Path) -> None:
    """Three ranks, whose sums have several orders: that of a partition does not depend on when it leaves."""
    one, *_ = ranks(3, train, PRIORITY, str(folder))
    again, *_ = ranks(3, train, PRIORITY, str(folder))
    assert one.losses == again.losses
    assert same_bits(one, again)
    plain, *_ = ranks(3, train, ORDER, str(folder))
    assert one.losses == pytest.approx(plain.losses, rel=LOSSES)
    assert one.norms[1:] != one.norms[:-1]
    assert one.norms[4:] == pytest.approx(plain.norms[3:-1], rel=LOSSES)


@pytest.mark.slow
def test_a_run_by_priority_goes_on_bitwise(ranks, folder: Path) -> None:
    """4 + 4 steps are 8, though the second life rehearses anew."""
    first, *_ = ranks(3, train, PRIORITY, str(folder), "stopped", 4)
    second, *_ = ranks(3, train, PRIORITY, str(folder), "stopped", 4)
    whole, *_ = ranks(3, train, PRIORITY, str(folder), "whole", 8)
    assert first.losses + second.losses == whole.losses
    assert same_bits(second, whole)


DIRECT = {"kind": "python", "build": "tests.verification.user_models:strided", "arguments": {"direct": True}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "tables"), [(2, {"batch": {"micro_samples": 2}}), (4, {}), (2, {"model": DIRECT})], ids=str
)
def test_verify_holds(ranks, folder: Path, world: int, tables: Tables) -> None:
    """Every gradient and every weight, to 1e-12."""
    verdict, *_ = ranks(world, verified, PRIORITY | tables, str(folder), True, 5)
    assert verdict["holds"], verdict["sentence"]


def test_a_parameter_that_is_used_without_its_module_is_up_to_date(ranks, folder: Path) -> None:
    """It is found in the first steps, and then waited for before the model runs."""
    by_priority, *_ = ranks(2, train, PRIORITY | {"model": DIRECT}, str(folder))
    plain, *_ = ranks(2, train, ORDER | {"model": DIRECT}, str(folder))
    assert by_priority.losses == plain.losses
    assert same_bits(by_priority, plain)


def saved_by_the_loop(tables: Tables, folder: Path, run: str) -> dict[str, Tensor]:
    """What stands in the checkpoint that the loop wrote when it was stopped, in one process."""
    directory = folder / run
    run_file = run_file_of(folder, **tables)
    own = msgspec.structs.replace(run_file.run, processes=1, directory=str(directory))
    with ExitStack() as stack:
        here = Place(0, 1, 0, 1, 0, "shoal")
        run_file = msgspec.structs.replace(run_file, run=own)
        job = training_job(start_training(run_file, here, stack, store=dist.HashStore()), directory, stack)
        stop = lambda: job.progress.step == STEPS - 2  # noqa: E731
        job = dataclasses.replace(job, cadence=Cadence(STEPS), stop_requested=stop)
        with pytest.raises(Stopped):
            loop.train(job)
    return read_all(read_manifest(Places(directory).step(STEPS - 1)), directory)


def test_a_checkpoint_holds_the_update_of_its_step(folder: Path) -> None:
    """The loop waits for what is under way before it saves."""
    by_priority, plain = saved_by_the_loop(PRIORITY, folder, "late"), saved_by_the_loop(ORDER, folder, "at-once")
    assert by_priority.keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in by_priority.items())


def deaf(place: TestPlace, tables: Tables, folder: str) -> Trained:
    """The forward asks for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PriorityGradients, "_ask", lambda self, parameters: None)
        return train(place, tables, folder)


def test_a_forward_that_does_not_wait_shows(ranks, folder: Path) -> None:
    """The comparison has teeth: steps with weights that are a step old have other losses."""
    stale, *_ = ranks(2, deaf, PRIORITY, str(folder))
    plain, *_ = ranks(2, train, ORDER, str(folder))
    assert stale.losses[:4] == plain.losses[:4]
    assert stale.losses[4:] != pytest.approx(plain.losses[4:], rel=10 * LOSSES)


def searched(place: TestPlace, folder: str, run: str, steps: int, state: dict[str, Any] | None) -> Trained:
    """With a search among sizes that suit a small model, or that stands where `state` says."""
    given = state or {"sizes": [1000, 20_000], "tried": [[1000, []], [20_000, []]], "chosen": None}
    with pytest.MonkeyPatch.context() as patch:
        make = lambda gradients, lockstep: _loaded(given)  # noqa: E731
        patch.setattr("shoal.gradients.replicated.ReplicatedGradients._search", make)
        patch.setattr("shoal.gradients.replicated.OTHER", math.inf)
        return train(place, ADAM | {"gradients": {"bucket": "auto"}}, folder, run, steps)


def _loaded(state: dict[str, Any]) -> Any:
    from shoal.gradients.replicated import BucketSearch

    search = BucketSearch(state["sizes"])
    search.load(state)
    return search


def test_all_ranks_choose_one_size_and_compute_the_same_meanwhile(ranks, folder: Path) -> None:
    """Up to ten steps try two sizes; of two ranks the losses are those of a fixed size."""
    found = ranks(2, searched, str(folder), "", 11, None)
    plain, *_ = ranks(2, train, ORDER, str(folder), "", 11)
    assert found[0].remembered["chosen"] in (1000, 20_000)
    assert found[0].remembered == found[1].remembered
    assert all(2 <= len(seconds) <= 5 for _, seconds in found[0].remembered["tried"])
    assert found[0].losses == plain.losses


@pytest.mark.slow
def test_a_run_goes_on_with_the_size_that_it_found(ranks, folder: Path) -> None:
    """Bitwise on three ranks, where the size counts; and nothing is tried again."""
    chosen = {"sizes": [1000, 20_000], "tried": [[20_000, [0.0] * 5]], "chosen": 20_000}
    first, *_ = ranks(3, searched, str(folder), "found", 2, chosen)
    second, *_ = ranks(3, searched, str(folder), "found", 2, None)
    whole, *_ = ranks(3, searched, str(folder), "found-whole", 4, chosen)
    assert second.remembered == chosen
    assert first.losses + second.losses == whole.losses
    assert same_bits(second, whole)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"optimizer": {"clip_norm": 1.0}}, "optimizer.clip_norm = 1: .* set optimizer.clip_norm = inf"),
        ({"precision": {"kind": "float16"}}, 'precision.kind = "float16"'),
        ({"layout": {"shard": 2}}, "layout.shard = 2: it is for replicas of one rank"),
        ({"layout": {"pipeline": 2}}, "layout.pipeline = 2"),
        ({"run": {"compile": True}}, "run.compile = true"),
        ({"wire": {"check_collectives": True}}, "wire.check_collectives = true"),
        (
            {"gradients": {"schedule": "priority", "bucket": "auto"}},
            'gradients.bucket = "auto" with gradients.schedule',
        ),
        ({"gradients": {"schedule": "order", "bucket": "auto"}, "layout": {"shard": 2}}, "with layout.shard = 2"),
    ],
    ids=str,
)
def test_what_needs_the_whole_gradient_is_refused(tables: Tables, said: str) -> None:
    """By the key that stands against it."""
    run_file = run_file_of(Path("."), **{**PRIORITY, **tables})
    with pytest.raises(ConfigError, match=said):
        check_across(run_file, file="priority.toml")
