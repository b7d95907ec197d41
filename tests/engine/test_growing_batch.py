"""`batch.adaptive`: when steps double, that every sample is used once, and what it saves."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal.assembly.metering import feed_of
from shoal.assembly.run import Run, open_run
from shoal.cost.noise_scale import Moments
from shoal.data.config import ENDLESS, AdaptiveBatch, BatchConfig, BatchPhase
from shoal.data.feed import Feed, StepShare
from shoal.data.order import Order
from shoal.engine.growing_batch import BatchGrowth, GrowingFeed
from shoal.engine.recovery import resume
from shoal.launcher.environment import Place
from shoal.observe.capsule import NEXT_SAMPLES
from shoal.runfile.rules import check_across, refusal
from shoal.runfile.run_file import RunFile
from tests.assembly.journey import save, whole_state
from tests.ranks import TestPlace
from tests.verification.layouts import corpus, run_file_of, verified
from tests.verification.test_batch_schedule import Numbers

TARGET = 0.2
LEAST_GAIN, MOST_SAMPLES = 1.3, 1.1
"""Fewer steps than with the small batch, for no more than this share of its samples."""


def test_steps_double_when_the_noise_pays_for_it() -> None:
    """After enough readings, by their mean, up to the largest, and never for a noise that is no number."""
    growth = BatchGrowth(AdaptiveBatch(first=8, share=0.5, readings=3), largest=20)
    quiet, loud, lost = (
        Moments(signal=1.0, trace=31.0),
        Moments(signal=1.0, trace=32.3),
        Moments(signal=-1.0, trace=9.0),
    )
    sizes = []
    for reading in [quiet] * 4 + [loud] * 40 + [Moments(signal=1.0, trace=1e3)] * 30:
        growth.note(reading)
        sizes.append(growth.samples)
    assert sizes[:4] == [8] * 4, "0.5 x 31 is below 2 x 8"
    first = sizes.index(16)
    assert 10 <= first < 14, "the mean of ten readings comes over 32 slowly"
    assert sizes[first + 2] == 16
    assert sizes[-1] == 20, "no larger than the largest"
    unsure = BatchGrowth(AdaptiveBatch(first=8, readings=1), largest=20)
    unsure.note(lost)
    assert unsure.samples == 8


def test_what_was_saved_goes_on_alike() -> None:
    """In the middle of the readings for a decision; under a smaller largest step, with that."""
    config = AdaptiveBatch(first=8, share=1.0, readings=4)
    readings = [Moments(signal=1.0 + 0.1 * n, trace=20.0 + 3 * n) for n in range(30)]
    whole, broken = BatchGrowth(config, largest=64), BatchGrowth(config, largest=64)
    sizes: list[int] = []
    for number, reading in enumerate(readings):
        whole.note(reading)
        broken.note(reading)
        sizes.append(whole.samples)
        resumed = BatchGrowth(config, largest=64)
        resumed.load(msgspec.json.decode(msgspec.json.encode(broken.to_state())))
        broken = resumed
        assert broken.samples == whole.samples, number
    assert len(set(sizes)) > 1
    smaller = BatchGrowth(config, largest=12)
    smaller.load(whole.to_state())
    assert smaller.samples == 12


def test_every_sample_is_used_once_while_steps_grow() -> None:
    """By two replicas that read ahead, and from the middle on."""
    growths = [BatchGrowth(AdaptiveBatch(first=4), largest=16) for _ in range(2)]
    position = 0

    def opened(replica: int) -> Any:
        def feed(samples: int) -> Feed:
            share = StepShare(16, replica, 2, schedule=(BatchPhase(samples, ENDLESS),))
            return Feed(Numbers(), Order(64, 0), share, start=position, prefetch_steps=3)

        return feed

    feeds = [GrowingFeed(growth, opened(replica)) for replica, growth in enumerate(growths)]
    used: list[int] = []
    try:
        for size in (4, 4, 8, 8, 16):
            for growth in growths:
                growth.samples = size
            steps = [feed.next() for feed in feeds]
            assert {len(step.interval) for step in steps} == {size}
            assert all(growth.fed == size for growth in growths)
            used += [int(p) for step in steps for batch in step.microbatches for p in batch.positions]
            position += size
    finally:
        for feed in feeds:
            feed.close()
    assert used == list(range(position))


def opened(place: TestPlace, tables: dict[str, Any], directory: Path) -> Run:
    """A small net on digits in float64."""
    base = {
        "run": {"name": "growing", "steps": 600, "directory": str(directory), "processes": place.size},
        "model": {"kind": "mlp", "inputs": 64, "hidden": [32], "outputs": 10},
        "data": {"kind": "digits"},
        "precision": {"kind": "float64"},
        "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
        "schedule": {"kind": "constant"},
        "observe": {"noise_every_steps": 1},
    }
    run_file = msgspec.convert(base | tables, RunFile)
    check_across(run_file, file="growing.toml")
    return open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)


GROWING = {"batch": {"global_samples": 64, "micro_samples": 4, "adaptive": {"first": 16}}}


def gone_on(
    place: TestPlace, tables: dict[str, Any], directory: str, steps: int
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The sizes of so many further steps from the newest checkpoint, and the state after them, which is saved."""
    run = opened(place, tables, Path(directory))
    resume(run.state, Path(directory), announce=run.process.announce, warn=print)
    run.generation.gradients.gather()
    sizes, announced, progress = list[int](), list[int](), run.state.progress
    with closing(feed_of(run)) as feed:
        for _ in range(steps):
            fed = feed.next()
            progress.advance(fed.interval)
            run.step(progress.step, fed.microbatches, lr=run.rate(progress.step), samples=len(fed.interval))
            sizes.append(len(fed.interval))
            announced.append(int(run.state.figures()[NEXT_SAMPLES]))
    assert announced[:-1] == sizes[1:], "a step says how many samples the next one has"
    save(run, Path(directory), place)
    return sizes, whole_state(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"layout": {"replicate": 2}},
        pytest.param({"layout": {"shard": 2}, "memory": {"zero": 1}}, marks=pytest.mark.stress),
        pytest.param({"layout": {"shard": 2}, "memory": {"zero": 3}}, marks=pytest.mark.stress),
    ],
    ids=str,
)
def test_a_run_goes_on_bitwise_with_the_same_sizes_on_all_ranks(ranks, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Through several doublings, broken between two of them."""
    batch = {"global_samples": 128, "micro_samples": 2, "adaptive": {"first": 8, "readings": 12, "share": 4.0}}
    tables = {"batch": batch} | layout
    straight = ranks(2, gone_on, tables, str(tmp_path / "straight"), 30)
    first = ranks(2, gone_on, tables, str(tmp_path / "broken"), 18)
    then = ranks(2, gone_on, tables, str(tmp_path / "broken"), 12)
    sizes, state = straight[0]
    assert all(found == sizes for found, _ in straight)
    assert first[0][0] + then[0][0] == sizes
    assert len(set(sizes)) >= 3, sizes
    assert all(torch.equal(then[0][1][name], tensor) for name, tensor in state.items())


@pytest.mark.slow
def test_a_run_goes_on_with_the_size_it_had_in_another_world(ranks, tmp_path: Path) -> None:
    """Steps grow on from leg to leg; when they do depends on the shares between which a world measures the noise."""
    batch = {"global_samples": 128, "micro_samples": 2, "adaptive": {"first": 8, "readings": 6, "share": 4.0}}
    worlds = ({"layout": {"replicate": 2}}, {"layout": {"shard": 2}, "memory": {"zero": 3}}, {})
    sizes = list[int]()
    for layout in worlds:
        found = ranks(2 if layout else 1, gone_on, {"batch": batch} | layout, str(tmp_path / "moved"), 10)
        assert all(own == found[0][0] for own, _ in found)
        sizes += found[0][0]
    assert len(set(sizes)) >= 3, sizes
    assert all(size in (before, 2 * before) for before, size in pairwise(sizes)), sizes


def reached(place: TestPlace, tables: dict[str, Any], folder: str, seed: int) -> tuple[int, int]:
    """Steps and samples until the held-out loss is at most `TARGET`; it is looked at every 96 samples."""
    own = {"run": {"name": "growing", "steps": 3000, "directory": folder, "processes": 1, "seed": seed}}
    run = opened(place, tables | own, Path(folder))
    progress, looked = run.state.progress, 0
    with closing(feed_of(run)) as feed:
        while progress.step < 3000:
            fed = feed.next()
            progress.advance(fed.interval)
            run.step(progress.step, fed.microbatches, lr=run.rate(progress.step), samples=len(fed.interval))
            if progress.samples - looked >= 96:
                looked = progress.samples
                if run.evaluate()["loss/eval"] <= TARGET:
                    break
    return progress.step, progress.samples


@pytest.mark.stress
def test_growing_saves_steps_and_hardly_costs_samples(ranks, tmp_path: Path) -> None:
    """To the same held-out loss as steps of 16, the rate following the size, over three seeds together."""
    optimizer = {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "lr_for_samples": 16}}
    small = optimizer | {"batch": {"global_samples": 16, "micro_samples": 4}, "observe": {}}
    found = {}
    for name, tables in (("fixed", small), ("growing", optimizer | GROWING)):
        each = [ranks(1, reached, tables, str(tmp_path / f"{name}-{seed}"), seed)[0] for seed in (1, 2, 3)]
        print(name, each)
        found[name] = [sum(column) for column in zip(*each, strict=True)]
    assert found["fixed"][0] >= LEAST_GAIN * found["growing"][0]
    assert found["growing"][1] <= MOST_SAMPLES * found["fixed"][1]


def test_steps_of_the_first_size_are_proved(ranks, tmp_path: Path) -> None:
    """With the rate of that size."""
    corpus(tmp_path)
    tables = {
        "batch": {"global_samples": 16, "micro_samples": 2, "adaptive": {"first": 4, "readings": 1}},
        "observe": {"noise_every_steps": 1},
        "optimizer": {"kind": "sgd", "lr": 0.1, "lr_for_samples": 16},
        "layout": {"replicate": 2},
    }
    verdict, *_ = ranks(2, verified, tables, str(tmp_path), True, 3)
    assert verdict["holds"], verdict["sentence"]


REFUSED = [
    ({"observe": {}}, "the noise decides; set it to 5, say"),
    ({"sync": {"kind": "local"}}, 'set it to "allreduce"'),
    ({"layout": {"shard": 2}, "batch": {"global_samples": 9, "adaptive": {"first": 2}}}, "use multiples of 2"),
]


@pytest.mark.parametrize(("tables", "repair"), REFUSED)
def test_it_is_refused_where_it_cannot_be(tmp_path: Path, tables: dict[str, Any], repair: str) -> None:
    """With what to do."""
    batch = {"batch": {"global_samples": 8, "adaptive": {"first": 2}}}
    run_file = run_file_of(tmp_path, **({"observe": {"noise_every_steps": 2}} | batch | tables))
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=2))
    sentence = refusal(run_file)
    assert sentence is not None
    assert sentence.startswith("batch.adaptive")
    assert repair in sentence


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"adaptive": {"first": 8}}, "lower the one, or raise the other"),
        ({"adaptive": {"first": 2}, "schedule": [{"samples": 2, "until": 9}]}, "either the position or the noise"),
        ({"adaptive": {"first": 2}, "epoch_end": "short"}, "leave epoch_end out"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], said: str) -> None:
    """In a sentence."""
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert({"global_samples": 8} | keys, BatchConfig)
