"""Asynchronous push-sum: nobody waits for the slowest, and nothing is lost however late it comes."""

from __future__ import annotations

import heapq
import os
import random
import re
import signal
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.assembly.run import open_run
from shoal.comm.ledger import Ledger
from shoal.engine.recovery import resume
from shoal.errors import ConfigError
from shoal.launcher.environment import Place
from shoal.maths.mixing import equal_shares
from shoal.runfile.rules import check_across
from shoal.sync.config import GossipConfig
from shoal.sync.event_order import EventFiles, Rounds
from shoal.sync.flat_copy import SYNC
from shoal.sync.push_sum import LateShares, MixingSchedule, PushSum, Share
from shoal.verification.refusals import require_provable
from tests.assembly.journey import save, whole_state
from tests.ranks import TestPlace
from tests.verification.layouts import GPT, corpus, run_file_of
from tests.waiting import HANG_S

Tables = dict[str, Any]
CONSERVED = 1e-12
"""Of sums in float64."""

SMALL = GPT | {"layers": 1, "width": 16, "feed_forward_width": 24}
LATE: Tables = {
    "kind": "gossip", "algorithm": "sgp", "asynchronous": True, "delay": 4, "meet_every": 40, "graph": "ring",
}  # fmt: skip
NEIGHBOURS = [[1, 2], [2], [3], [0, 1]]
STEPS = 40


@dataclass
class Network:
    """Messages between replicas, which are delivered when they are told to be."""

    ways: dict[tuple[int, int], Queue[Tensor]] = field(default_factory=dict)
    flying: list[tuple[float, int, int, int, Tensor]] = field(default_factory=list)
    now_s: float = 0.0
    chance: random.Random = field(default_factory=random.Random)

    def way(self, source: int, to: int) -> Queue[Tensor]:
        return self.ways.setdefault((source, to), Queue())

    def deliver(self, until_s: float) -> None:
        """What arrives by then."""
        while self.flying and self.flying[0][0] <= until_s:
            _, _, source, to, message = heapq.heappop(self.flying)
            self.way(source, to).put(message)


@dataclass
class Arriving:
    """A message that may not be there yet."""

    way: Queue[Tensor]
    into: Tensor

    def wait(self) -> None:
        self.into.copy_(self.way.get(timeout=HANG_S))


class Sent:
    def wait(self) -> None:
        """It has left."""


@dataclass
class Lane:
    """One replica's end of the network. A message never overtakes another of the same way."""

    rank: int
    network: Network
    last_s: dict[int, float] = field(default_factory=dict)

    def send(self, tensor: Tensor, *, to: int) -> Sent:
        at = max(self.network.now_s + self.network.chance.expovariate(0.4), self.last_s.get(to, 0.0))
        self.last_s[to] = at
        heapq.heappush(self.network.flying, (at, id(tensor), self.rank, to, tensor.clone()))
        return Sent()

    def recv(self, tensor: Tensor, *, source: int) -> Arriving:
        return Arriving(self.network.way(source, self.rank), tensor)


class Counting(PushSum):
    """A node that keeps the shares which it has sent, and how many of each source it has added."""

    def push(self, fractions: Any) -> dict[int, Share]:
        shares = super().push(fractions)
        copied = {to: share._replace(x=[x.clone() for x in share.x]) for to, share in shares.items()}
        self.__dict__.setdefault("log", []).extend(copied.items())
        return shares

    def receive(self, share: Share) -> bool:
        self.__dict__.setdefault("added", set()).add((share.source, share.number))
        return super().receive(share)


def total(nodes: list[Counting]) -> tuple[Tensor, float]:
    """The sums of x and w over nodes and shares that were sent and not added yet."""
    added = [node.__dict__.get("added", set()) for node in nodes]
    logs = [entry for node in nodes for entry in node.__dict__.get("log", [])]
    late = [share for to, share in logs if (share.source, share.number) not in added[to]]
    x = sum((node.x[0] for node in nodes), torch.zeros(5, dtype=torch.float64))
    return sum((share.x[0] for share in late), x), sum(n.weight for n in nodes) + sum(s.weight for s in late)


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_kept_on_a_clock_of_uneven_replicas(seed: int) -> None:
    """One replica is five times as slow, messages take as long as a step or ten. Updates in between are all that
    changes the sum of x; in the end, when all has come, the weights of all sum to their number.
    """
    network, generator = Network(chance=random.Random(seed)), torch.Generator().manual_seed(seed)
    nodes = [Counting(rank, [torch.randn(5, generator=generator, dtype=torch.float64)]) for rank in range(4)]
    schedule = MixingSchedule([equal_shares(NEIGHBOURS)], STEPS, STEPS)
    replicas = [LateShares(Lane(rank, network), schedule, delay=STEPS, ledger=Ledger()) for rank in range(4)]  # type: ignore[arg-type]
    (expected, _), delays = total(nodes), []
    events = [(1.0 + rank, rank, 1) for rank in range(4)]
    while events:
        network.now_s, rank, step = heapq.heappop(events)
        network.deliver(network.now_s)
        time.sleep(0.0005)  # threads put what was delivered into inboxes
        update = torch.randn(5, generator=generator, dtype=torch.float64)
        nodes[rank].x[0].sub_(update)
        expected = expected - update
        replicas[rank].exchange(nodes[rank], step)
        delays.append(replicas[rank].figures()["gossip/staleness"])
        x, weight = total(nodes)
        assert float((x - expected).abs().max()) < CONSERVED
        assert abs(weight - 4) < CONSERVED
        if step < STEPS - 1:
            heapq.heappush(events, (network.now_s + (5.0 if rank == 3 else 1.0), rank, step + 1))
    assert max(delays) > 20, "shares of the slow replica were to be late"
    ends = [threading.Thread(target=replicas[rank].exchange, args=(nodes[rank], STEPS)) for rank in range(4)]
    for end in ends:
        end.start()
    while any(end.is_alive() for end in ends):
        network.deliver(float("inf"))
        time.sleep(0.001)
    assert abs(sum(node.weight for node in nodes) - 4) < CONSERVED
    assert float((sum(node.x[0] for node in nodes) - expected).abs().max()) < CONSERVED


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tokens that follow each other in turn, which is soon learnt."""
    folder = tmp_path_factory.mktemp("late")
    (folder / "tokens.bin").write_bytes((np.arange(20_000) % 61).astype(np.uint8).tobytes())
    return folder


@dataclass
class Ended:
    """What one rank came to: its losses, how late the latest share of each step was, and its weights after the end."""

    losses: list[float]
    weights: dict[str, Tensor]
    latest: list[float]


def train(place: TestPlace, sync: Tables, folder: str, order: str = "", replay: str = "", lead: int = 0) -> Ended:
    """`STEPS` steps, of which the last replica begins none before replica 0 is `lead` ahead of it. `order`: where the
    order of events goes, `replay`: where the one is that is repeated.
    """
    files = EventFiles(
        Path(folder) / order / str(place.rank) if order else None,
        Path(folder) / replay / str(place.rank) if replay else None,
    )
    tables = {
        "model": SMALL, "sync": sync, "precision": {"kind": "float64"}, "batch": {"global_samples": 12, "sequence": 8},
        "run": {"steps": STEPS, "processes": place.size}, "optimizer": {"kind": "adamw", "lr": 2e-2},
    }  # fmt: skip
    run_file = run_file_of(Path(folder), **tables)
    check_across(run_file, file="late.toml")
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    run = open_run(run_file, here, store=place.store, rounds=Rounds(files) if order or replay else None)
    ended = Ended([], {}, [])
    with closing(run.feed()) as feed:
        for number in range(1, STEPS + 1):
            fed = feed.next()
            gated = 0 < (number - 1) % sync["meet_every"] < sync["meet_every"] - lead  # all meet where a round ends
            if lead and gated and place.rank == place.size - 1:
                place.store.wait([f"ended/{number - 1 + lead}"])
            ended.losses.append(run.step(number, fed.microbatches, lr=2e-2).loss)
            ended.latest.append(run.generation.agreement.take_figures().get("gossip/latest", 0.0))
            if place.rank == 0:
                place.store.set(f"ended/{number}", "")
    ended.weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    return ended


@pytest.mark.slow
def test_uneven_replicas_reach_the_loss(ranks, folder: Path) -> None:
    """Beside a replica that is slow, the others go on; all end with one model, and learn what waiting replicas do."""
    waiting = ranks(3, train, LATE | {"asynchronous": False}, str(folder))
    late = ranks(3, train, LATE, str(folder), "", "", 3)
    assert waiting[0].losses[0] > 3.5
    assert max(one.losses[-1] for one in waiting) < 1.0
    assert max(one.losses[-1] for one in late) < 1.0
    assert max(late[0].latest) >= 2, "replica 0 was to be ahead of the slow one"
    assert all(torch.equal(one.weights[name], w) for one in late for name, w in late[0].weights.items())


@pytest.mark.slow
def test_a_recorded_order_gives_the_same_bits(ranks, folder: Path) -> None:
    """Though another replica is slow when it is repeated."""
    first = ranks(3, train, LATE | {"meet_every": 20}, str(folder), "order", "", 3)
    again = ranks(3, train, LATE | {"meet_every": 20}, str(folder), "again", "order")
    for one, other in zip(first, again, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(other.weights[name], w) for name, w in one.weights.items())
    for rank in range(3):
        assert (folder / "order" / str(rank)).read_text() == (folder / "again" / str(rank)).read_text()


@dataclass
class Leg:
    """A part of a run on one rank: its state when it began and when it ended, the weights with which this replica
    began, and the losses of its steps.
    """

    came: dict[str, Tensor]
    began: dict[str, Tensor]
    left: dict[str, Tensor]
    losses: list[float]


def travel(place: TestPlace, folder: str, last: int, lr: float, save_at: int = 0, kill_at: int = 0) -> Leg:
    """Goes on from the newest checkpoint to step `last`, saves after `save_at`; the last replica is killed by SIGKILL
    within the round, after `kill_at`.
    """
    tables = {
        "model": SMALL, "sync": LATE | {"meet_every": 20}, "precision": {"kind": "float64"},
        "batch": {"global_samples": 12, "sequence": 8}, "optimizer": {"kind": "adamw", "lr": 2e-2, "weight_decay": 0.0},
        "run": {"steps": 100, "processes": place.size, "directory": str(Path(folder) / "killed")},
        "wire": {"timeout_s": 10.0},
    }  # fmt: skip
    run_file = run_file_of(Path(folder), **tables)
    run = open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)
    directory, progress = Path(folder) / "killed", run.state.progress
    resume(run.state, directory, announce=run.process.announce, warn=print)
    leg = Leg(whole_state(run), {}, {}, [])
    run.generation.agreement.before_step()
    leg.began = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with closing(run.feed()) as feed:
        while progress.step < last:
            fed = feed.next()
            progress.advance(fed.interval)
            leg.losses.append(run.step(progress.step, fed.microbatches, lr=lr).loss)
            if progress.step == save_at:
                save(run, directory, place)
            if progress.step == kill_at and place.rank == place.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    leg.left = whole_state(run)
    return leg


def sums(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Of x and of the weights over three replicas."""
    own = f"{SYNC}replica-{{}}/"
    names = [name.removeprefix(own.format(0)) for name in state if name.startswith(own.format(0) + "x/")]
    x = {name: sum((state[own.format(k) + name] for k in range(3)), torch.zeros(())) for name in names}
    return x, sum(float(state[own.format(k) + "weight"]) for k in range(3))


@pytest.mark.slow
def test_a_killed_run_goes_on_with_all_that_it_had(ranks, tmp_path: Path) -> None:
    """A replica is killed while shares are on their way. The run resumes from the meeting before: every replica with
    its own x and weight; over twenty steps of rate 0 the sums of both are kept, late shares or not; and it
    learns on, to one model.
    """
    (tmp_path / "tokens.bin").write_bytes((np.arange(20_000) % 61).astype(np.uint8).tobytes())
    outcomes = ranks.outcomes(3, travel, str(tmp_path), 60, 2e-2, 20, 33)
    assert not any(worked for worked, _ in outcomes)
    legs = ranks(3, travel, str(tmp_path), 40, 0.0)
    still = legs[0]
    for rank, leg in enumerate(legs):
        own, weight = f"{SYNC}replica-{rank}/", float(still.came[f"{SYNC}replica-{rank}/weight"])
        for name, began in leg.began.items():
            assert torch.allclose(began * weight, still.came[f"{own}x/{name}"], rtol=CONSERVED, atol=CONSERVED), name
    x, weight = sums(still.came)
    assert len(x) > 5
    assert abs(weight - 3.0) < CONSERVED
    assert len({float(still.came[f"{SYNC}replica-{k}/weight"]) for k in range(3)}) > 1, "nothing was uneven"
    x_after, weight_after = sums(still.left)
    assert abs(weight_after - 3.0) < CONSERVED
    for name, before in x.items():
        assert float((x_after[name] - before).abs().max()) < CONSERVED * float(before.abs().max()), name
        own = still.came[f"{SYNC}replica-0/{name}"]
        assert not torch.equal(own, still.left[f"{SYNC}replica-0/{name}"]), "replicas were to mix"
    on = ranks(3, travel, str(tmp_path), 60, 2e-2)
    assert all(torch.equal(on[0].came[name], still.came[name]) for name in still.came)
    assert on[0].losses[-1] < 0.7 * on[0].losses[0]


@pytest.mark.parametrize("delay", [1, 3])
def test_a_share_is_waited_for_when_it_is_late_enough(ranks, folder: Path, delay: int) -> None:
    """None is later than `delay` steps, though one replica is slow; and nobody waits for ever."""
    late = ranks(3, train, LATE | {"delay": delay}, str(folder), "", "", delay)
    assert max(late[0].latest[:-1]) == delay


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"algorithm": "d_psgd"}, 'asynchronous = true with algorithm = "d_psgd"'),
        ({"delay": 0}, "asynchronous = true without delay"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: Tables, words: str) -> None:
    """When the table is read."""
    with pytest.raises(msgspec.ValidationError, match=re.escape(words)):
        msgspec.convert(LATE | keys, GossipConfig)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"layout": {"replicate": 2, "shard": 2}}, "layout.shard = 2: with asynchronous = true a replica is one rank"),
        ({"run": {"device": "cuda", "processes": 2}}, 'run.device = "cuda": with asynchronous = true'),
    ],
    ids=str,
)
def test_what_cannot_be_late_is_refused(tmp_path: Path, tables: Tables, words: str) -> None:
    """In a sentence, before any process starts."""
    corpus(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_across(run_file_of(tmp_path, **({"sync": LATE} | tables)), file="late.toml")


def test_verify_names_the_replay(tmp_path: Path) -> None:
    """Time decides in which step a share is added."""
    with pytest.raises(ConfigError, match="shoal train --replay RUN_DIR"):
        require_provable(run_file_of(tmp_path, sync=LATE))
