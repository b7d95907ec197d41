"""One training step as tasks: a schedule's rows on compute streams, transfers and sums of gradients on ports.

    rank's stream     F0 F1 ... B0 ...  in the row's order; an action starts when its inputs have arrived
    ports out and in  activations and their gradients; sums of gradients, a unit at a time, as soon as the last backward
                      of a stage has produced it
    barrier           the global gradient norm needs all sums of all ranks; then gathers and the optimizer

Replicas that do the same are folded into one, and so are the tensor and context peers of a pipeline rank, which wait
for each other in every layer: `Fold` says how many of each are simulated, and how many there are. Where devices differ
(`Stragglers`), replicas differ and none is folded; peers still are, by the maximum of their factors.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shoal.planner.simulate.play import Played, Tasks, play
from shoal.planner.simulate.work import Stage, Stragglers, Work
from shoal.schedules.check import Needs, completing, needs, walk
from shoal.schedules.table import Action, Table


@dataclass(frozen=True, kw_only=True)
class Fold:
    """There are `replicas` pipelines of `peers` devices a rank. Each flag says whether one stands for all."""

    replicas: int = 1
    peers: int = 1
    fold_replicas: bool = True
    fold_peers: bool = True

    @property
    def shown_replicas(self) -> int:
        """Replicas that are simulated."""
        return 1 if self.fold_replicas else self.replicas

    @property
    def shown_peers(self) -> int:
        """Peers of a rank that are simulated."""
        return 1 if self.fold_peers else self.peers

    def stands_for(self, peer: int) -> range:
        """The devices whose place a simulated peer takes."""
        return range(self.peers) if self.fold_peers else range(peer, peer + 1)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A simulated device: where it stands and what it has."""

    replica: int
    rank: int
    peer: int
    number: int

    @property
    def out(self) -> int:
        """Its port towards the network."""
        return 2 * self.number

    @property
    def into(self) -> int:
        """Its port from the network."""
        return 2 * self.number + 1


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """What was played, and of whom. `actions[place number]` are the tasks of its row, in order."""

    table: Table
    work: Work
    played: Played
    places: tuple[Place, ...]
    actions: tuple[tuple[int, ...], ...]


def simulate_step(
    table: Table, work: Work, *, fold: Fold | None = None, stragglers: Stragglers | None = None
) -> SimulatedStep:
    """Plays one step. Raises `ValueError` where `work` has not one stage for each of the table's."""
    if len(work.stages) != table.stages:
        raise ValueError(f"work of {len(work.stages)} stages for a table of {table.stages}: give one for each")
    built = _Building(table, work, fold or Fold(), stragglers or Stragglers())
    for rank, action in walk(table, built.needed):
        built.act(rank, action)
    built.sum_gradients()
    built.finish()
    actions = tuple(tuple(one) for one in built.rows)
    return SimulatedStep(table=table, work=work, played=play(built.tasks), places=tuple(built.places), actions=actions)


class _Building:
    """Tasks of a step as they grow, walking the table."""

    def __init__(self, table: Table, work: Work, fold: Fold, stragglers: Stragglers) -> None:
        places = fold.shown_replicas * table.ranks * fold.shown_peers
        self.tasks = Tasks(streams=places, ports=2 * places)
        self.table, self.work, self.fold = table, work, fold
        self.needed: Needs = needs(table)
        self.completing = [completing(table, rank) for rank in range(table.ranks)]
        self.by_place = {
            (replica, rank, peer): self._place(replica, rank, peer)
            for replica in range(fold.shown_replicas)
            for rank in range(table.ranks)
            for peer in range(fold.shown_peers)
        }
        self.places = sorted(self.by_place.values(), key=lambda place: place.number)
        self.by_rank = [self._peers_of(rank) for rank in range(table.ranks)]
        self.paces = [self._pace(place, stragglers) for place in self.places]
        self.rows: list[list[int]] = [[] for _ in self.places]
        self.done = [0] * table.ranks
        self.arrivals: dict[tuple[int, Action], list[int]] = {}
        self.units: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self.sums: list[int] = []

    def _place(self, replica: int, rank: int, peer: int) -> Place:
        number = (replica * self.table.ranks + rank) * self.fold.shown_peers + peer
        return Place(replica=replica, rank=rank, peer=peer, number=number)

    def _pace(self, place: Place, stragglers: Stragglers) -> list[float]:
        peers, actions = self.fold.stands_for(place.peer), len(self.table.rows[place.rank])
        return stragglers.slowest(place.replica, place.rank, peers, actions=actions)

    def _peers_of(self, rank: int) -> list[list[Place]]:
        """The simulated devices of a rank, those of a replica together: they go in lock-step."""
        return [
            [self.by_place[replica, rank, peer] for peer in range(self.fold.shown_peers)]
            for replica in range(self.fold.shown_replicas)
        ]

    def act(self, rank: int, action: Action) -> None:
        """Adds an action of every simulated device of `rank`, and the transfer of its result.

        Peers start and end together: collectives inside an action hold each of them until the last has come.
        """
        for peers in self.by_rank[rank]:
            before = [self.rows[place.number][-1] for place in peers if self.rows[place.number]]
            inputs = [task for place in peers for task in self._inputs(place, action)]
            for place in peers:
                self._compute(place, action, before + inputs)
            ends = [self.rows[place.number][-1] for place in peers]
            for place in peers:
                self._send(place, action, ends)
        self.done[rank] += 1

    def _inputs(self, place: Place, action: Action) -> list[int]:
        """What has to arrive from other ranks; results of the same rank come earlier in its row."""
        return [
            task
            for earlier in self.needed[action]
            if self.table.placement[earlier.stage] != place.rank
            for task in self.arrivals[place.number, earlier]
        ]

    def _compute(self, place: Place, action: Action, after: list[int]) -> None:
        stage, pace = self.work.stages[action.stage], self.paces[place.number][self.done[place.rank]]
        lasting_s = pace * _lasting_s(stage, action)
        ends_stage = action in self.completing[place.rank] and bool(stage.sums)
        parts = _parts(stage, lasting_s, self.work) if ends_stage else [lasting_s]
        for unit, part_s in enumerate(parts):
            number = self.tasks.add(
                f"{action.kind}{action.microbatch} s{action.stage}",
                "compute",
                rank=place.number,
                stream=place.number,
                busy_s=part_s,
                after=after,
            )
            self.rows[place.number].append(number)
            after = [number]
            if ends_stage:
                self.units[place.rank, action.stage, unit].append(number)

    def _send(self, place: Place, action: Action, after: list[int]) -> None:
        """To the rank of the next stage on the way; W has nobody who waits for it."""
        stage = action.stage + (1 if action.kind == "F" else -1)
        if action.kind == "W" or not 0 <= stage < self.table.stages:
            return
        target = self.table.placement[stage]
        if target == place.rank:
            return
        receiver = self.by_place[place.replica, target, place.peer]
        name, cost = f"{action.kind}{action.microbatch} s{action.stage}", self.work.transfer
        arrived = self.tasks.add(
            f"send {name}",
            "transfer",
            rank=place.number,
            stream=place.number if self.work.blocks_sender else None,
            ports=(place.out, receiver.into),
            busy_s=cost.busy_s,
            latency_s=cost.latency_s,
            after=after,
        )
        self.arrivals[receiver.number, action] = [arrived]
        if self.work.blocks_receiver:
            received = self.tasks.add(
                f"receive {name}",
                "transfer",
                rank=receiver.number,
                stream=receiver.number,
                busy_s=cost.busy_s,
                after=after,
            )
            self.arrivals[receiver.number, action].append(received)

    def sum_gradients(self) -> None:
        """One collective for each unit of each stage and peer, over all replicas at once."""
        for (rank, stage, unit), after in self.units.items():
            cost = self.work.stages[stage].sums[unit]
            last = [self.rows[place.number][-1] for peers in self.by_rank[rank] for place in peers]
            for members in zip(*self.by_rank[rank], strict=True):
                number = self.tasks.add(
                    f"sum s{stage} unit {unit}",
                    "collective",
                    rank=members[0].number,
                    ports=tuple(port for place in members for port in (place.out, place.into)),
                    busy_s=cost.busy_s,
                    latency_s=cost.latency_s,
                    after=last if self.work.behind else after,
                )
                self.sums.append(number)

    def finish(self) -> None:
        """The barrier of the gradient norm, then what every rank does alone."""
        ends = [self.rows[place.number][-1] for place in self.places if self.rows[place.number]]
        barrier = self.tasks.add("norm", "join", rank=0, after=[*ends, *self.sums])
        for place in self.places:
            gathered = self.tasks.add(
                "gather",
                "collective",
                rank=place.number,
                ports=(place.out, place.into),
                busy_s=self.work.after.busy_s,
                after=[barrier],
            )
            self.tasks.add(
                "optimizer",
                "optimizer",
                rank=place.number,
                stream=place.number,
                busy_s=self.work.optimizer_s,
                after=[gathered],
            )


def _lasting_s(stage: Stage, action: Action) -> float:
    return {
        "F": stage.forward_s,
        "I": stage.input_s,
        "W": stage.weight_s,
        "B": stage.input_s + stage.weight_s,
    }[action.kind]


def _parts(stage: Stage, lasting_s: float, work: Work) -> list[float]:
    """The last backward of a stage, a part for each unit; parts that run beside a sum are slowed down by it."""
    each = lasting_s / len(stage.sums)
    beside = [0.0, *(min(each, message.busy_s) for message in stage.sums[:-1])]
    return [each + (0.0 if work.behind else work.slowdown * hidden) for hidden in beside]
