"""The order of events at a part that a server has: recorded, and played again.

What an asynchronous run computes follows from the order in which contributions arrive, parameters are read, and workers
leave. A run that records it can be repeated bitwise: an event then waits for its turn. An event is a letter and the
number of a worker,

    c0   worker 0 contributes      r0   worker 0 reads
    t0   worker 0 looks rows of a table up                  l0   worker 0 leaves

Under asynchronous gossip the events of a replica are its own: a0, a share of replica 0 is added, and g, the step is
over. Where the period of local steps follows the link, p20 says that the next agreement is 20 steps away; where a codec
is chosen by the link, wint8 says with what the step sums; k{...}, which size of buckets it uses, and on which measured
links its groups choose algorithms.

Each rank has a file of its own, with a line of JSON for each round: {"first": 1, "last": 50, "events": ["c0", ...]}. A
run that went on from a checkpoint records rounds again; the last line of a step counts. What is decided for each step,
as a codec, has a line for each change, and holds until the next one.

No two ranks wait for each other for ever: program order and the order at every part were those of one run before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, Protocol

from shoal.errors import ConfigError

CONTRIBUTE, READ, LOOK_UP, LEAVE, CODEC, LINKS = "c", "r", "t", "l", "w", "k"


class EventFiles(NamedTuple):
    """Where a rank writes the order of its events, and where it reads the order that it repeats; None: it does not."""

    record: Path | None = None
    replay: Path | None = None


def event_file(directory: Path, rank: int) -> Path:
    """The file of `rank` in the run directory `directory`."""
    return directory / "order" / f"rank-{rank:05}.jsonl"


class EventOrder(Protocol):
    """The order of one round at one part. Its methods are called with the part's lock held."""

    def may(self, event: str) -> bool:
        """Whether it is the turn of `event`."""
        ...

    def happened(self, event: str) -> None:
        """The event is over."""
        ...

    def decided(self, event: str) -> str:
        """What was decided by the clock: `event` itself, or what the recorded run decided in its place."""
        ...


class AsTheyCome:
    """Every event may happen at once; `events` are those that have."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def may(self, event: str) -> bool:
        return True

    def happened(self, event: str) -> None:
        self.events.append(event)

    def decided(self, event: str) -> str:
        self.happened(event)
        return event


class AsRecorded(AsTheyCome):
    """Events wait for their turn in `recorded`."""

    def __init__(self, recorded: list[str]) -> None:
        super().__init__()
        self._recorded = recorded

    def may(self, event: str) -> bool:
        """Raises `ConfigError` where the recorded round is over: the run is another one."""
        return self._next() == event

    def decided(self, event: str) -> str:
        return super().decided(self._next())

    def _next(self) -> str:
        turn = len(self.events)
        if turn == len(self._recorded):
            raise ConfigError(
                f"the recorded round has {turn} events, and here is one more: replay with the code, the keys and the "
                "number of processes of the run that recorded it"
            )
        return self._recorded[turn]


class Rounds:
    """Records the rounds of one rank, and repeats recorded ones, as `files` say."""

    def __init__(self, files: EventFiles) -> None:
        """Raises `ConfigError` for a file that is not there, or holds something else."""
        self._record = files.record
        self._replayed = None if files.replay is None else read_rounds(files.replay)
        self._step = 0
        self._order = AsTheyCome()
        self._held: list[str] = []
        """What was decided last, of all that a step asks."""

    @property
    def repeats(self) -> bool:
        """Whether recorded rounds are repeated."""
        return self._replayed is not None

    def begin(self) -> EventOrder:
        """The order of the round that begins after the step that `end` named last."""
        if self._replayed is None:
            self._order = AsTheyCome()
            return self._order
        recorded = self._replayed.get(self._step + 1)
        if recorded is None:
            raise ConfigError(
                f"no order of events is recorded for the round from step {self._step + 1} on, as the run stopped "
                "there: let it go on to its last step, then replay it"
            )
        self._order = AsRecorded(recorded)
        return self._order

    def end(self, step: int) -> None:
        """The round has ended with `step`."""
        first, self._step = min(self._step + 1, step), step
        self._write(first, self._order.events)

    def decide(self, event: str, *, first: bool) -> str:
        """What is decided of the next step by the clock, or was in the recorded run; `first` of what that step asks."""
        if first:
            self._step += 1
            self._order = self._decisions()
        found = self._order.decided(event)
        turn = len(self._order.events) - 1
        if self._held[turn : turn + 1] != [found]:
            self._held[turn : turn + 1] = [found]
            self._write(self._step, self._held)
        return found

    def keep_record(self) -> None:
        """Makes the file of this rank, which may have nothing to decide: an empty record is one, too."""
        if self._record is not None:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            self._record.touch()

    def resume(self, step: int) -> None:
        """The run goes on after `step`."""
        self._step = step
        self._held.clear()

    def _decisions(self) -> AsTheyCome:
        """Those of this step: the last that the recorded run wrote down, as none has changed since."""
        if self._replayed is None:
            return AsTheyCome()
        first = max((begin for begin in self._replayed if begin <= self._step), default=None)
        if first is None:
            raise ConfigError(
                f"nothing is recorded that this rank decided by step {self._step}, and now it decides: replay on hosts "
                "that have as many ranks each as those of the run"
            )
        return AsRecorded(self._replayed[first])

    def _write(self, first: int, events: list[str]) -> None:
        if self._record is None:
            return
        self._record.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"first": first, "last": self._step, "events": events}, separators=(",", ":"))
        with self._record.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_rounds(path: Path) -> dict[int, list[str]]:
    """The events of each round, by its first step. Raises `ConfigError`."""
    rounds: dict[int, list[str]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            first, events = int(entry["first"]), [str(event) for event in entry["events"]]
            rounds = {begin: order for begin, order in rounds.items() if begin < first}
            rounds[first] = events
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is not there: this rank recorded neither an order of events nor what it chose by its link. The "
            "run had fewer processes, or other keys (sync, codec, wire.algorithm, gradients.bucket), or an earlier "
            "version made it; replay with its keys on as many processes, or record it anew"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no record of events ({error}): it was cut or changed; record the run anew"
        ) from error
    return rounds
