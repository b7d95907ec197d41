"""`sync.kind = "server"`: every rank is a worker, and serves a part of the parameters to all."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal.assembly.run import Run, open_run
from shoal.config.check import checked
from shoal.engine.recovery import resume
from shoal.errors import ConfigError
from shoal.launcher.environment import Place
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile
from shoal.sync.strategy import Taken
from tests.assembly.journey import save, whole_state
from tests.ranks import TestPlace
from tests.verification.layouts import corpus, run_file_of

Tables = dict[str, Any]
LR, STEPS = 0.05, 12
LONG = 50
SGD: Tables = {"optimizer": {"kind": "sgd", "clip_norm": None}, "precision": {"kind": "float64"}}
ADAM: Tables = {"optimizer": {"clip_norm": None}, "precision": {"kind": "float64"}}
LEAST: Tables = {
    "run": {"name": "least", "steps": 1},
    "model": {"kind": "gpt", "vocabulary": 61, "layers": 1, "width": 8, "heads": 1},
    "data": {"kind": "stdlib"},
    "batch": {"global_samples": 2},
}
BATCH: Tables = {"batch": {"global_samples": 12, "denominator": "samples"}}
COUNTING: Tables = {"model": {"kind": "python", "build": f"{__name__}:Counting"}, "data": {"kind": "digits"}}
SUM_ORDER = 1e-12  # float64
AMPLIFIED = 1e-9  # float64, 12 steps of Adam
LIKE_ALL_REDUCE = 1e-6  # float32, 50 steps


class Counting(nn.Linear):
    """A model that counts its forwards, as batch norm does."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        return super().forward(input.flatten(1))


class Trained(NamedTuple):
    state: dict[str, Tensor]
    agreed: list[bool]
    figures: list[dict[str, float]]
    equal: bool


def server(admission: str = "sync", **keys: Any) -> Tables:
    return {"sync": {"kind": "server", "admission": admission, **keys}}


def opened(place: TestPlace, tables: Tables, folder: str, directory: Path, steps: int) -> Run:
    run_file = run_file_of(Path(folder), **tables)
    own = msgspec.structs.replace(run_file.run, processes=place.size, directory=str(directory), steps=steps)
    run_file = msgspec.structs.replace(run_file, run=own)
    check_across(run_file, file="server.toml")
    return open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)


def train(
    place: TestPlace, tables: Tables, folder: str, first: int = 0, last: int = STEPS, name: str = "", steps: int = 0
) -> Trained:
    """Steps `first` + 1 .. `last` of `steps`, from the checkpoint of `name` if they are not the first, saved there if
    they are not the last.
    """
    directory = Path(folder) / (name or "unused")
    run, agreed, figures = opened(place, tables, folder, directory, steps or last), [], []
    if first:
        resume(run.state, directory, announce=run.process.announce, warn=print)
    progress = run.state.progress
    with closing(run.feed()) as feed:
        for _ in range(first, last):
            fed = feed.next()
            progress.advance(fed.interval)
            result = run.step(progress.step, fed.microbatches, lr=LR)
            agreed.append(result.agreed is not None)
            figures.append(dict(run.generation.agreement.take_figures()))
    mine = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    first_ranks = mine.clone()
    run.mesh.world.broadcast(first_ranks).wait()
    if name and last < (steps or last):
        save(run, directory, place)
    return Trained(whole_state(run), agreed, figures, torch.equal(mine, first_ranks))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    corpus(folder)
    return folder


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("model/")}


def distance(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative distance of a parameter."""
    return max(float((ours[name] - tensor).norm() / tensor.norm()) for name, tensor in weights(wanted).items())


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "sync", [server(), server(period=5), server("bounded", bound=0, period=5)], ids=["sync", "period", "bounded by 0"]
)
def test_synchronous_admission_is_all_reduce(ranks, folder: Path, sync: Tables, workers: int) -> None:
    """With SGD, momentum and shares of one size; and all workers end with the same bits."""
    tables = BATCH | SGD | {"optimizer": {"kind": "sgd", "momentum": 0.9, "clip_norm": None}}
    found = ranks(workers, train, tables | sync, str(folder))
    plain = ranks(workers, train, tables, str(folder))[0]
    assert all(one.equal for one in found)
    assert distance(found[0].state, plain.state) < SUM_ORDER


@pytest.mark.slow
def test_after_fifty_steps_in_float32_too(ranks, folder: Path) -> None:
    """A server, and the mean of local steps that are agreed on one by one: within what orders of summation differ by.
    Agreed on every second step they are elsewhere.
    """
    tables = BATCH | {"optimizer": {"kind": "sgd", "clip_norm": None}, "precision": {"kind": "float32"}}
    average = {"kind": "local", "period": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    plain, served, local, rarely = (
        ranks(2, train, tables | sync, str(folder), 0, LONG)[0]
        for sync in ({}, server(), {"sync": average}, {"sync": average | {"period": 2}})
    )
    assert distance(served.state, plain.state) < LIKE_ALL_REDUCE
    assert distance(local.state, plain.state) < LIKE_ALL_REDUCE
    assert distance(rarely.state, plain.state) > LIKE_ALL_REDUCE


def bits_and_wire(place: TestPlace, tables: Tables, folder: str, transport: str) -> tuple[dict[str, Tensor], int]:
    """The weights after some steps, and the bytes that they sent."""
    run, sent = opened(place, tables | {"wire": {"transport": transport}}, folder, Path(folder) / "unused", 4), 0
    with closing(run.feed()) as feed:
        for number in range(1, 5):
            fed = feed.next()
            run.state.progress.advance(fed.interval)
            sent += run.step(number, fed.microbatches, lr=LR).wire["send"].bytes_sent
    return weights(whole_state(run)), sent


@pytest.mark.parametrize("sync", [server(), server(servers=1)], ids=["in workers", "apart"])
def test_numbers_found_in_shared_memory_are_those_that_are_sent(ranks, folder: Path, sync: Tables) -> None:
    """To the bit, and they count as sent."""
    found = [ranks(3, bits_and_wire, SGD | BATCH | sync, str(folder), name) for name in ("gloo", "shm")]
    for by_gloo, by_memory in zip(*found, strict=True):
        assert all(torch.equal(by_gloo[0][name], values) for name, values in by_memory[0].items())
        assert by_gloo[1] == by_memory[1] > 0


@pytest.mark.slow
@pytest.mark.matrix(first=2)
@pytest.mark.parametrize(
    "sync",
    [server(), server("bounded", bound=0, period=4), server("async", period=4), server("bounded", bound=2, period=4)],
    ids=["sync", "bounded by 0", "async", "bounded"],
)
def test_a_run_goes_on(ranks, folder: Path, sync: Tables) -> None:
    """From a checkpoint, moments included; to the bit where the order of contributions does not matter."""
    name = "-".join(map(str, sync["sync"].values()))
    tables = ADAM | BATCH | sync
    whole, *_ = ranks(2, train, tables, str(folder))
    ranks(2, train, tables, str(folder), 0, 8, name, STEPS)
    resumed, *_ = ranks(2, train, tables, str(folder), 8, STEPS, name)
    assert resumed.state.keys() == whole.state.keys()
    assert "optimizer/exp_avg/head.weight" in whole.state
    if name in ("server-sync", "server-bounded-0-4"):
        assert all(torch.equal(tensor, whole.state[key]) for key, tensor in resumed.state.items())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in resumed.state.values())


@pytest.mark.slow
def test_another_number_of_workers_goes_on_from_it(ranks, folder: Path) -> None:
    """Moments lie in the checkpoint under the unsplit model's names: three workers, or all-reduce, take them over."""
    wanted = ranks(2, train, ADAM | BATCH, str(folder))[0]
    ranks(2, train, ADAM | BATCH | server(), str(folder), 0, 8, "moves", STEPS)
    for size, sync in ((3, server()), (2, {})):
        found = ranks(size, train, ADAM | BATCH | sync, str(folder), 8, STEPS, "moves")[0]
        assert distance(found.state, wanted.state) < AMPLIFIED


@pytest.mark.parametrize("staleness", ["plain", "scaled", "compensated"])
def test_asynchronous_workers_agree_at_the_end(ranks, folder: Path, staleness: str) -> None:
    """They make equally many steps, end with the same parameters, and every gradient is an update."""
    sync = server("async", period=6, staleness=staleness)
    found = ranks(3, train, SGD | BATCH | sync, str(folder))
    assert all(one.equal for one in found)
    assert found[0].agreed == [step % 6 == 0 for step in range(1, STEPS + 1)]
    last = [one.figures[-1] for one in found]
    assert all(figures["server/updates"] == 3 * 6 for figures in last)
    assert all(figures["server/counted"] == 6 for figures in last)
    assert all(figures["server/staleness"] >= 0 for figures in last)
    assert all(figures["server/wait_s"] > 0 for figures in last)


def train_with_a_gap(place: TestPlace, tables: Tables, folder: str) -> tuple[dict[str, float], bool]:
    """Rank 1's gradient of step 2 is not finite, as its update policy tells: it makes no update. Figures after the
    last step, and whether parameters are those of rank 0.
    """
    run = opened(place, tables, folder, Path(folder) / "gap", 4)
    agreement = run.generation.agreement
    with closing(run.feed()) as feed:
        for number in range(1, 5):
            batches = feed.next().microbatches
            if place.rank == 1 and number == 2:
                agreement.before_step()
                agreement.after_update(number, Taken(False, 0, math.nan, LR))
            else:
                run.step(number, batches, lr=LR)
    mine = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    first_ranks = mine.clone()
    run.mesh.world.broadcast(first_ranks).wait()
    return dict(agreement.take_figures()), torch.equal(mine, first_ranks)


@pytest.mark.parametrize("sync", [server(period=4), server("bounded", bound=1, period=4)], ids=["sync", "bounded"])
def test_a_gradient_that_is_not_finite_holds_up_nobody(ranks, folder: Path, sync: Tables) -> None:
    """Its worker takes part with nothing: there are as many updates as steps."""
    for figures, equal in ranks(2, train_with_a_gap, SGD | BATCH | sync, str(folder)):
        assert figures["server/updates"] == 4
        assert equal


def train_late(place: TestPlace, tables: Tables, folder: str) -> tuple[list[bool], dict[str, float], bool]:
    """One round in which rank 2 ends its first step when rank 0 has made five: which steps it skipped, its figures
    after the last, and whether its parameters and buffers are those of rank 0.
    """
    run = opened(place, tables, folder, Path(folder) / "late", STEPS)
    skipped = []
    with closing(run.feed()) as feed:
        for number in range(1, STEPS + 1):
            late = place.rank == 2 and number == 1
            wait = (lambda norm: place.store.wait(["five steps"])) if late else None
            skipped.append(run.step(number, feed.next().microbatches, lr=LR, on_gradients=wait).skipped)
            if place.rank == 0 and number == 5:
                place.store.set("five steps", "made")
    mine = torch.cat([tensor.detach().double().flatten() for tensor in run.model.state_dict().values()])
    first_ranks = mine.clone()
    run.mesh.world.broadcast(first_ranks).wait()
    return skipped, dict(run.generation.agreement.take_figures()), torch.equal(mine, first_ranks)


def test_a_late_worker_holds_up_nobody_and_goes_on_with_the_others(ranks, folder: Path) -> None:
    """Two of three make an update: the late gradient is dropped, its worker skips the steps made without it, there are
    as many updates as steps, and all agree at the end, also on how many forwards there were.
    """
    tables = SGD | BATCH | COUNTING | server("backup", backup=1)
    found = ranks(3, train_late, tables, str(folder))
    skipped, figures, _ = found[2]
    assert skipped[1:5] == [True] * 4
    assert not skipped[0]
    assert figures["server/dropped"] >= 1
    assert all(figures["server/updates"] == STEPS for _, figures, _ in found)
    assert all(equal for _, _, equal in found)


def test_bounded_workers_wait_for_the_slowest(ranks, folder: Path) -> None:
    """Every step of all workers is one update, whatever the bound."""
    found = ranks(3, train, SGD | BATCH | server("bounded", bound=2), str(folder))
    assert all(one.equal for one in found)
    assert all(one.figures[-1]["server/updates"] == STEPS for one in found)
    assert all(figures["server/staleness"] <= 2 for one in found for figures in one.figures)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"run": {"processes": 1}}, "one replica: there is no other to work with"),
        ({"layout": {"shard": 2}, "run": {"processes": 4}}, "layout.shard = 2: its workers are replicas of one rank"),
        ({"sync": {"admission": "backup", "backup": 2}}, "backup = 2: of 2 workers none would be left"),
        ({"batch": {"global_samples": 3}}, "batch.global_samples = 3: every worker's gradient counts the same"),
        ({"gradients": {"schedule": "priority"}}, 'gradients.schedule = "priority"'),
        ({"precision": {"kind": "float16"}}, 'precision.kind = "float16"'),
        ({"observe": {"noise_every_steps": 1}}, "observe.noise_every_steps"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, tables: Tables, words: str) -> None:
    """In a sentence, before any process starts."""
    corpus(tmp_path)
    tables = {"run": {"processes": 2}, "optimizer": {"clip_norm": None}, **tables}
    tables["sync"] = {"kind": "server"} | tables.get("sync", {})
    with pytest.raises(ConfigError, match=words):
        check_across(run_file_of(tmp_path, **tables), file="server.toml")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"bound": 2}, 'bound = 2 with admission = "sync"'),
        ({"admission": "bounded"}, 'admission = "bounded" without bound'),
        ({"admission": "bounded", "bound": -1}, "bound"),
        ({"admission": "backup", "backup": 0}, "backup"),
        ({"admission": "bounded", "bound": 1, "staleness": "scaled"}, "staleness = 'scaled'"),
        ({"staleness_cap": 3}, "staleness_cap = 3"),
    ],
)
def test_keys_that_make_no_sense_together_are_refused(keys: Tables, words: str) -> None:
    """Nothing is silently ignored."""
    with pytest.raises(ConfigError, match=words):
        checked(LEAST | {"sync": {"kind": "server", **keys}}, RunFile, file="server.toml")
