"""The ranks of one replica: they enter and leave every generation together.

They meet at a store that the first of them hosts for as long as the replica lives. It alone asks the coordinator for
the next generation, and tells the others; at the end of one all say what they hold. The replica holds a state when all
its ranks hold that of the same step: then the parts fit together. The launcher ends them all when it loses one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]

from shoal.coordinator.client import STOPPED_WAITING, Begin, NoGeneration
from shoal.errors import CollectiveError, Stopped
from shoal.launch.arrival import say_arrived
from shoal.launch.environment import Place
from shoal.launch.rendezvous import Rendezvous

DONE, NOTHING = "done", "nothing"
"""What a rank says that has finished the run, and one that holds no state."""
FIRST_POLL_S, LAST_POLL_S = 0.002, 0.05


class ReplicaRanks:
    """Rank `rank` of `size`. `check` is called while it waits: it raises where there is nothing to wait for any more.
    `stopping`: nobody wants another generation.

    All methods raise `CollectiveError` where the store is gone, and with it the first rank.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, check: Callable[[], None], stopping: Callable[[], bool]
    ) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._check, self._stopping = check, stopping
        self._generations = 0

    def arrive(self, place: Place, replica: str, *, timeout_s: float) -> None:
        """All ranks of `replica` have loaded what they train. Blocks until they have, for `timeout_s` at most."""
        say_arrived(os.environ, replica=replica)
        Rendezvous(self._store, place, timeout_s=timeout_s).barrier("all ranks of the replica")

    def begin(self, find: Callable[[], Begin]) -> Begin:
        """The next generation, which the first rank finds by `find`, on all. On all alike it raises `NoGeneration`, and
        `Stopped` where all were asked to stop.
        """
        self._generations += 1
        if self.size == 1:
            return find()
        key = f"begin/{self._generations}"
        if self.rank == 0:
            try:
                begin = find()
            except NoGeneration as error:
                self._set(key, msgspec.json.encode(str(error)))
                raise
            self._set(key, msgspec.json.encode(begin))
            return begin
        told = self._wait([key], until=self._stopping)
        if not told:
            raise Stopped(STOPPED_WAITING)
        answer = msgspec.json.decode(told[0], type=Begin | str)
        if isinstance(answer, str):
            raise NoGeneration(answer)
        return answer

    def leave_step(self, *, within_s: float) -> None:
        """A collective failed here: gives the others of the replica `within_s` to finish an update that they have
        begun, before this rank ends the groups that they share.
        """
        if self.size > 1:
            self._set(self._key("left", self.rank), b"")
            deadline_s = time.monotonic() + within_s
            keys = [self._key("left", rank) for rank in range(self.size)]
            self._wait(keys, until=lambda: time.monotonic() > deadline_s)

    def end(self, step: int | None, *, done: bool = False) -> tuple[bool, bool]:
        """The generation is over for this rank, which holds the state after `step`, or none; `done`: the run is over.

        (whether all ranks hold the same, whether one of them has finished the run)
        """
        if self.size == 1:
            return step is not None, done
        own = DONE if done else NOTHING if step is None else str(step)
        self._set(self._key("held", self.rank), own.encode())
        said = [text.decode() for text in self._wait([self._key("held", rank) for rank in range(self.size)])]
        return len(set(said)) == 1 and NOTHING not in said, DONE in said

    def part(self, *, within_s: float) -> None:
        """The last that ranks say to each other: the first one, which hosts the store, stays until all have."""
        if self.size > 1:
            self._set(f"parted/{self.rank}", b"")
            if self.rank == 0:
                deadline_s = time.monotonic() + within_s
                keys = [f"parted/{rank}" for rank in range(self.size)]
                self._wait(keys, until=lambda: time.monotonic() > deadline_s)

    def _key(self, what: str, rank: int) -> str:
        return f"{what}/{self._generations}/{rank}"

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)  # pyright: ignore[reportArgumentType] bytes are legal
        except DistError as error:
            raise CollectiveError(f"rank 0 of the replica is gone: {error}") from error

    def _wait(self, keys: Sequence[str], until: Callable[[], bool] = lambda: False) -> list[bytes]:
        """The values of `keys` when all are there; none when `until` says so first."""
        pause_s = FIRST_POLL_S
        try:
            while not self._store.check(list(keys)):
                if until():
                    return []
                self._check()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_POLL_S)
            return [self._store.get(key) for key in keys]
        except DistError as error:
            raise CollectiveError(f"rank 0 of the replica is gone: {error}") from error
