"""Who did not come: after a collective has failed, the ranks tell each other through the store how far they got.

Every rank whose collective failed publishes how many it had started. Those that say nothing within the patience are
dead, stopped or busy elsewhere: they are the culprits. A store that does not answer lies with the rank that hosts it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Diagnosis:
    """What one rank of one group needs to find the culprits. `members` names each rank for people (rank, host, pid)."""

    store: Store
    rank: int
    members: tuple[str, ...]
    patience_s: float = 2.0

    def sentence(self, what: str, started: int, waited_s: float, error: str) -> str:
        """One or two sentences: what failed on whom after how long, and which ranks are to blame."""
        head = f"{self.members[self.rank]}: {what} failed after {waited_s:.1f} s"
        silent, behind = self._culprits(started)
        if silent is None:
            return f"{head}, and the store does not answer: its host, {self.members[0]}, is dead or stopped"
        if silent:
            return f"{head}: {_named(self.members, silent)} did not come: dead, stopped, or busy for too long"
        if behind:
            return f"{head}: {_named(self.members, behind)} called another collective or fewer of them"
        return f"{head}: {error.splitlines()[0] if error else 'the backend gave no reason'}"

    def _culprits(self, started: int) -> tuple[list[int] | None, list[int]]:
        """The ranks that say nothing (None: the store is gone) and those that have started fewer collectives."""
        heard: dict[int, int] = {}
        try:
            self.store.set(f"stuck/{self.rank}", str(started))
            deadline_s = time.monotonic() + self.patience_s
            while len(heard) < len(self.members) and time.monotonic() < deadline_s:
                for rank in set(range(len(self.members))) - heard.keys():
                    if self.store.check([f"stuck/{rank}"]):
                        heard[rank] = int(self.store.get(f"stuck/{rank}"))
                time.sleep(0.05)
        except (RuntimeError, ValueError):
            return None, []
        silent = [rank for rank in range(len(self.members)) if rank not in heard]
        return silent, [rank for rank, count in heard.items() if count < max(heard.values())]


def introduce(store: Store, rank: int, size: int, *, myself: str, timeout_s: float) -> tuple[str, ...]:
    """Every rank writes who it is and reads who the others are."""
    store.set(f"member/{rank}", myself)
    store.wait([f"member/{other}" for other in range(size)], timedelta(seconds=timeout_s))
    return tuple(store.get(f"member/{other}").decode() for other in range(size))


def _named(members: tuple[str, ...], ranks: list[int]) -> str:
    return ", ".join(members[rank] for rank in ranks)
