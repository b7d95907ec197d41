"""Which rank is to blame: after a collective has failed, the ranks tell each other how far they got.

Every rank whose collective failed publishes how many it had started. Those that publish nothing in time are dead,
stopped or busy elsewhere: they are the culprits. A store that does not answer points to the rank that hosts it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.board import Board
from shoal.errors import CollectiveError

PATIENCE_S = 2.0


@dataclass(frozen=True)
class Diagnosis:
    """What one rank of one group needs to find the culprits. `members` names each rank for people (rank, host, pid)."""

    board: Board
    rank: int
    members: tuple[str, ...]
    patience_s: float = PATIENCE_S

    def sentence(self, what: str, started: int, waited_s: float, error: str) -> str:
        """One or two sentences: what failed on which rank after how long, and which ranks are to blame."""
        head = f"{self.members[self.rank]}: {what} failed after {waited_s:.1f} s"
        try:
            counts = self._counts(started)
        except CollectiveError:
            return f"{head}, and the store does not answer: its host, {self.members[0]}, is dead or stopped"
        if silent := [name for rank, name in enumerate(self.members) if rank not in counts]:
            return f"{head}: {', '.join(silent)} did not come: dead, stopped, or busy for too long"
        if behind := [self.members[rank] for rank, count in counts.items() if count < max(counts.values())]:
            return f"{head}: {', '.join(behind)} called another collective or fewer of them"
        return f"{head}: {error.splitlines()[0] if error else 'the backend gave no reason'}"

    def _counts(self, started: int) -> dict[int, int]:
        """How many collectives each rank has started; ranks that publish nothing are left out."""
        self.board.publish(f"stuck/{self.rank}", str(started))
        keys = {f"stuck/{rank}": rank for rank in range(len(self.members))}
        heard = self.board.collect_some(list(keys), self.patience_s)
        return {keys[key]: int(value) for key, value in heard.items()}
