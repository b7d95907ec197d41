"""The scenarios of a rehearsal: which faults, and what a run promises when they strike.

A run that is rehearsed takes `STEPS` steps and saves after every second one. Faults strike in step `AT`, so that one
checkpoint lies behind them and one before the end. Where a run has several ranks, the last one is struck; saves are
struck on rank 0, which commits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.checkpoint.objects import ACTIONS
from shoal.experiments.rehearsal.faults import DELAY_S, RATE_MBIT, Trouble
from shoal.resilience.faults import JOURNAL, Action, Fault

STEPS, SAVE_EVERY, AT = 8, 2, 5
GRACE_S = 1.0
"""A preemption that leaves less time than a save takes; the save is held up for longer."""

JOIN_S = 20.0
"""How long an elastic run that was struck waits for the replacement, which is to be struck as well."""

SLOW_S, STOPPED_S, GOING_S = 4.0, 0.2, 0.1
"""A slow rank is stopped for 0.2 s, goes on for 0.1 s, and so on, for 4 s."""
CUT_S = 15.0
"""How long hosts are cut off: longer than the limit of a collective (10 s) and than the usual `elastic.silence_s`."""
BAD_S = 3.0
"""How long a link is slow or late, or the coordinator away."""
FULL_S, FULL_BYTES = 2.0, 256 << 20
"""How long a file system of so many bytes is full: over the save after step `AT` + 1."""

Promise = Literal["same", "unharmed", "noticed", "nothing"]
"""What is checked of the end: "same": somebody was told, the run is finished and its state is that of the undisturbed
run; "unharmed": the latter two; "noticed": it is finished, and somebody was told, but the state is another (a step was
skipped); "nothing": no mechanism sees it."""
Family = Literal[
    "rank", "optimizer", "save", "recovery", "coordinator", "preemption", "disk", "corruption", "numbers", "slow",
    "network",
]  # fmt: skip
FAMILIES: tuple[Family, ...] = (
    "rank", "optimizer", "save", "recovery", "coordinator", "preemption", "disk", "corruption", "numbers", "slow",
    "network",
)  # fmt: skip
USUAL_POINTS = ("object/write.before", "object/rename.after", "commit/rename.before", "commit/rename.after")
"""Of the points of a save, those that are struck unless all are asked for."""


@dataclass(frozen=True)
class Scenario:
    """`damages`: which file of the newest checkpoint is changed after the first process has ended; "each": one after
    the other, each of which has to be noticed, and the last stays. `grace_s`: seconds after the strike in which the run
    has to end, before it is killed whole. `network`: what a relay between two hosts does after the strike, for
    `lasts_s`; `slows`: the rank that is struck is slow for so long. `fills`: the run directory is a file system of its
    own, which is full for so long. `restarts_coordinator`: that is a process of its own, which is killed, and comes
    back after so long.
    """

    name: str
    family: Family
    faults: tuple[Fault, ...]
    promise: Promise = "same"
    damages: Literal["", "manifest", "object", "latest", "each"] = ""
    grace_s: float | None = None
    network: Trouble | None = None
    slows: bool = False
    fills: bool = False
    restarts_coordinator: bool = False
    lasts_s: float = 0.0
    save_every: int = SAVE_EVERY
    keep: int = 2
    steps: int = STEPS

    @property
    def slug(self) -> str:
        """A name for its folder."""
        return "".join(c if c.isalnum() else "-" for c in self.name)


def scenarios(ranks: int, *, elastic: bool = False, every_point: bool = False) -> list[Scenario]:
    """All scenarios for a run of so many ranks; `every_point`: a kill at each point of a save."""
    last = ranks - 1
    return [
        *_rank_faults(last, alone=ranks == 1),
        Scenario("kill before the update", "optimizer", (_fault("kill", "optimizer/before", last),)),
        Scenario("kill after the update", "optimizer", (_fault("kill", "optimizer/after", last),)),
        *_save_faults(last, every_point=every_point),
        *_recovery_faults(last, elastic=elastic),
        *(_coordinator_faults(last) if elastic else []),
        Scenario(
            f"SIGTERM, {GRACE_S:g} s of grace",
            "preemption",
            (
                _fault("stop_run", "step/after", 0),
                Fault(action="wait", label="save/object/write.before", seconds=3 * GRACE_S, every_passing=True),
            ),
            grace_s=GRACE_S,
        ),
        *_disk_faults(),
        *_corruption(),
        *_numbers(last, ranks),
        *([_slow_rank(last)] if ranks > 1 else []),
        *(_network_faults() if ranks > 1 else []),
    ]


def _fault(action: Action, label: str, rank: int, *, step: int = AT, passing: int = 1) -> Fault:
    return Fault(action=action, label=label, rank=rank, step=step, passing=passing)


def _rank_faults(rank: int, *, alone: bool) -> list[Scenario]:
    found = [
        Scenario("kill before a step", "rank", (_fault("kill", "step/before", rank),)),
        Scenario("kill of the launcher", "rank", (_fault("kill_launcher", "step/before", 0),)),
    ]
    if alone:
        return found
    return [
        *found,
        Scenario("kill before a collective", "rank", (_fault("kill", "collective/before", rank),)),
        Scenario("kill in a collective", "rank", (_fault("kill", "collective/in", rank),)),
        Scenario("kill after a collective", "rank", (_fault("kill", "gradients/reduced", rank),)),
        Scenario("stop before a collective", "rank", (_fault("stop", "collective/before", rank),)),
        Scenario("a lock that nobody gives back", "rank", (_fault("hang", "step/before", rank),)),
    ]


def _save_faults(last: int, *, every_point: bool) -> list[Scenario]:
    points = [f"{action}.{moment}" for action in ACTIONS for moment in ("before", "after")]
    return [
        Scenario("kill between a step and its save", "save", (_fault("kill", "step/after", last, step=4),)),
        *_in_saves(points if every_point else USUAL_POINTS),
    ]


def _in_saves(points: Sequence[str]) -> list[Scenario]:
    return [
        Scenario(f"kill in a save, {point}", "save", (_fault("kill", f"save/{point}", 0, step=4),), keep=1)
        for point in points
    ]


def _recovery_faults(last: int, *, elastic: bool) -> list[Scenario]:
    first = _fault("kill", "step/before", last)
    if elastic:  # who joins gets the state from a peer: it is struck in its first step
        pause = Fault(action="wait", label="step/before", rank=0, step=AT + 1, seconds=JOIN_S)
        again = Fault(action="kill", label="step/before", rank=last)
        return [Scenario("kill, and kill the replacement in its first step", "recovery", (first, pause, again))]
    return [
        Scenario(f"kill, and kill in recovery ({moment})", "recovery", (first, _again(moment)))
        for moment in ("before", "in", "after")
    ]


def _coordinator_faults(last: int) -> list[Scenario]:
    """Replicas need it when one is lost, and for nothing else. Where it cannot write any more it ends: those that are
    left then save at the next loss, and the next start has another one.
    """
    strike = (_fault("outside", "step/before", 0),)
    full = Fault(action="fail_disk", label=JOURNAL, passing=AT)
    lost = Fault(action="kill", label="step/before", rank=last)
    return [
        Scenario(
            f"kill of the coordinator, which comes back after {BAD_S:g} s", "coordinator", strike, promise="unharmed",
            restarts_coordinator=True, lasts_s=BAD_S,
        ),
        Scenario("disk full for the coordinator, and then a kill of a rank", "coordinator", (full, lost)),
    ]  # fmt: skip


def _again(moment: str) -> Fault:
    return Fault(action="kill", label=f"recovery/{moment}", rank=0)


def _disk_faults() -> list[Scenario]:
    """Each save of one run fails at another action; the last save does not."""
    struck = [action for action in ACTIONS if action.endswith(("/write", "/fsync", "/rename"))]
    full = tuple(
        Fault(action="fail_disk", label=f"save/{action}.before", step=number)
        for number, action in enumerate(struck, start=1)
    )
    name = f"disk full at each of {len(full)} actions of a save"
    held = Fault(action="outside", label="step/before", step=AT)
    pause = Fault(action="wait", label="step/before", step=AT + 2, seconds=FULL_S + 1.0)
    return [
        Scenario(name, "disk", full, save_every=1, keep=1, steps=len(full) + 2),
        Scenario(f"a full file system for {FULL_S:g} s", "disk", (held, pause), fills=True, lasts_s=FULL_S, keep=1),
    ]


def _corruption() -> list[Scenario]:
    """Rank 0 is killed when its third save counts, so that there is a checkpoint before the newest."""
    kill = (_fault("kill", "save/pointer/fsync.after", 0, step=3 * SAVE_EVERY),)
    return [
        Scenario("a flipped bit in the newest manifest", "corruption", kill, damages="manifest"),
        Scenario("a flipped bit in an object of the newest checkpoint", "corruption", kill, damages="object"),
        Scenario("a flipped bit in `latest`", "corruption", kill, damages="latest"),
        Scenario("a flipped bit in each file of the newest checkpoint", "corruption", kill, damages="each"),
    ]


def _numbers(last: int, ranks: int) -> list[Scenario]:
    several: Promise = "same" if ranks > 1 else "nothing"
    return [
        Scenario("a batch with NaN", "numbers", (_fault("nan", "step/data", last),), promise="noticed"),
        Scenario("a flipped bit in a gradient", "numbers", (_fault("flip_gradient", "step/data", last),), "nothing"),
        Scenario("a flipped bit in a parameter", "numbers", (_fault("flip_parameter", "step/state", last),), several),
        Scenario("a flipped bit in a moment", "numbers", (_fault("flip_moment", "step/state", last),), several),
    ]


def _slow_rank(rank: int) -> Scenario:
    share = STOPPED_S / (STOPPED_S + GOING_S)
    name = f"a rank that stands still {share:.0%} of {SLOW_S:g} s"
    strike = (_fault("outside", "step/before", rank),)
    return Scenario(name, "slow", strike, promise="unharmed", slows=True, lasts_s=SLOW_S)


def _network_faults() -> list[Scenario]:
    """Between two hosts; which host the struck rank is on does not matter."""
    strike = (_fault("outside", "step/before", 0),)

    def trouble(name: str, kind: Trouble, promise: Promise, lasts_s: float) -> Scenario:
        return Scenario(name, "network", strike, promise=promise, network=kind, lasts_s=lasts_s)

    return [
        trouble(f"two hosts cut off for {CUT_S:g} s, in silence", "partition", "same", CUT_S),
        trouble(f"one way cut off for {CUT_S:g} s", "half_open", "same", CUT_S),
        trouble(f"the link of a host down for {CUT_S:g} s", "link_down", "same", CUT_S),
        trouble("every connection reset", "reset", "same", BAD_S),
        trouble(f"{DELAY_S:g} s more each way, for {BAD_S:g} s", "delay", "unharmed", BAD_S),
        trouble(f"a link of {RATE_MBIT} Mbit/s for {BAD_S:g} s", "slow_link", "unharmed", BAD_S),
        trouble("a flipped bit that TCP does not see", "flip", "nothing", CUT_S),
    ]
