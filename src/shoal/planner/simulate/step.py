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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.planner.simulate.play import Played, Tasks, play
from shoal.planner.simulate.work import Stage, StepWork, Stragglers, lasting_s
from shoal.schedules.table import Action, ScheduleTable
from shoal.schedules.timeline import Needs, completing, needs, walk

# Which devices of a layout are simulated, how fast each is, and the step that they take on a perfect network.
#
# On a network without latency and with unbounded rate nothing shares anything, and the end of an action is that of the
# last thing it waits for plus its own seconds: a longest path, which is computed for all replicas at once.


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


def paces_of(table: ScheduleTable, fold: Fold, stragglers: Stragglers) -> list[np.ndarray]:
    """By pipeline rank, how many times as long as it should each action takes: [replica, peer, action].

    A peer that stands for all is as slow in each action as the slowest of them.
    """
    paces = []
    for rank, row in enumerate(table.rows):
        if stragglers.even:
            paces.append(np.ones((fold.shown_replicas, fold.shown_peers, len(row))))
            continue
        own = stragglers.paces(rank, replicas=fold.replicas, peers=fold.peers, actions=len(row))[: fold.shown_replicas]
        paces.append(own.max(axis=1, keepdims=True) if fold.fold_peers else own)
    return paces


def perfect_step_s(table: ScheduleTable, work: StepWork, paces: list[np.ndarray]) -> float:
    """Seconds of the step where messages take no time."""
    needed = needs(table)
    ends: dict[Action, np.ndarray] = {}
    last = [np.zeros(len(pace)) for pace in paces]
    done = [0] * table.ranks
    for rank, action in walk(table, needed):
        begin = np.maximum.reduce([last[rank], *(ends[earlier] for earlier in needed[action])])
        slowest = paces[rank][:, :, done[rank]].max(axis=1)  # peers start and end together
        last[rank] = ends[action] = begin + slowest * lasting_s(work.stages[action.stage], action)
        done[rank] += 1
    return float(max(end.max() for end in last)) + work.optimizer_s


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """A simulated device: where it stands, and its ports towards the network and from it."""

    replica: int
    rank: int
    peer: int
    number: int
    out: int
    into: int


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """What was played, and of whom. `actions[place number]` are the tasks of its row, in order."""

    table: ScheduleTable
    work: StepWork
    played: Played
    places: tuple[StagePlace, ...]
    actions: tuple[tuple[int, ...], ...]


def simulate_step(
    table: ScheduleTable, work: StepWork, *, fold: Fold | None = None, stragglers: Stragglers | None = None
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

    def __init__(self, table: ScheduleTable, work: StepWork, fold: Fold, stragglers: Stragglers) -> None:
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
        self.paces = [pace.tolist() for pace in paces_of(table, fold, stragglers)]
        self.rows: list[list[int]] = [[] for _ in self.places]
        self.done = [0] * table.ranks
        self.arrivals: defaultdict[Action, dict[int, list[int]]] = defaultdict(dict)
        self.units: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self.sums: list[int] = []

    def _place(self, replica: int, rank: int, peer: int) -> StagePlace:
        number = (replica * self.table.ranks + rank) * self.fold.shown_peers + peer
        return StagePlace(replica=replica, rank=rank, peer=peer, number=number, out=2 * number, into=2 * number + 1)

    def _peers_of(self, rank: int) -> list[list[StagePlace]]:
        """The simulated devices of a rank, those of a replica together: they go in lock-step."""
        return [
            [self.by_place[replica, rank, peer] for peer in range(self.fold.shown_peers)]
            for replica in range(self.fold.shown_replicas)
        ]

    def act(self, rank: int, action: Action) -> None:
        """Adds an action of every simulated device of `rank`, and the transfer of its result.

        Peers start and end together: collectives inside an action hold each of them until the last has come.
        """
        placement, index, target = self.table.placement, self.done[rank], self._target(rank, action)
        arrived = [self.arrivals[earlier] for earlier in self.needed[action] if placement[earlier.stage] != rank]
        stage = self.work.stages[action.stage]
        planned_s, ends_stage = lasting_s(stage, action), action in self.completing[rank] and bool(stage.sums)
        name = f"{action.kind}{action.microbatch} s{action.stage}"
        for replica, peers in enumerate(self.by_rank[rank]):
            after = [self.rows[place.number][-1] for place in peers if self.rows[place.number]]
            after += [task for inputs in arrived for place in peers for task in inputs[place.number]]
            for place in peers:
                own_s = self.paces[rank][replica][place.peer][index] * planned_s
                parts = _parts(stage, own_s, self.work) if ends_stage else (own_s,)
                self._compute(place, name, parts, after, units=action.stage if ends_stage else None)
            ends = [self.rows[place.number][-1] for place in peers]
            if target is not None:
                for place in peers:
                    self._send(place, self.by_rank[target][replica][place.peer], action, name, ends)
        self.done[rank] += 1

    def _target(self, rank: int, action: Action) -> int | None:
        """The rank of the next stage on the way; W has nobody who waits for it, and a rank sends nothing to itself."""
        stage = action.stage + (1 if action.kind == "F" else -1)
        if action.kind == "W" or not 0 <= stage < self.table.stages:
            return None
        target = self.table.placement[stage]
        return None if target == rank else target

    def _compute(
        self, place: StagePlace, name: str, parts: Sequence[float], after: list[int], *, units: int | None
    ) -> None:
        """`units`: the stage whose gradients the parts produce, one unit each; None: none."""
        for unit, part_s in enumerate(parts):
            number = self.tasks.add(name, "compute", rank=place.number, stream=place.number, busy_s=part_s, after=after)
            self.rows[place.number].append(number)
            after = [number]
            if units is not None:
                self.units[place.rank, units, unit].append(number)

    def _send(self, place: StagePlace, receiver: StagePlace, action: Action, name: str, after: list[int]) -> None:
        cost = self.work.transfer
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
        self.arrivals[action][receiver.number] = [arrived]
        if self.work.blocks_receiver:
            received = self.tasks.add(
                f"receive {name}",
                "transfer",
                rank=receiver.number,
                stream=receiver.number,
                busy_s=cost.busy_s,
                after=after,
            )
            self.arrivals[action][receiver.number].append(received)

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
            coded = []
            if self.work.coding_s:
                number, busy_s = place.number, self.work.coding_s
                coded.append(
                    self.tasks.add("coding", "optimizer", rank=number, stream=number, busy_s=busy_s, after=[gathered])
                )
            self.tasks.add(
                "optimizer",
                "optimizer",
                rank=place.number,
                stream=place.number,
                busy_s=self.work.optimizer_s,
                after=coded or [gathered],
            )


def _parts(stage: Stage, lasting_s: float, work: StepWork) -> list[float]:
    """The last backward of a stage, a part for each unit; parts that run beside a sum are slowed down by it."""
    each = lasting_s / len(stage.sums)
    beside = [0.0, *(min(each, message.busy_s) for message in stage.sums[:-1])]
    return [each + (0.0 if work.behind else work.slowdown * hidden) for hidden in beside]
