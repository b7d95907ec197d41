"""A small sum over ranks in lock-step, in which each says which call it is in.

What a step counts, a number that a loop sums, and the end of a loop are sums of one shape on one group. So a rank that
makes another call than the others, such as one that leaves the loop alone, meets them there, and all of them learn it:

    [ranks in each call ...  numbers ...]  summed over the ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from shoal.comm.collective import Collective, Handle
from shoal.errors import UserCodeError

Call = Literal["the next step", "sum() or mean()", "held_out()", "export()", "the end of the loop"]
CALLS: tuple[Call, ...] = get_args(Call)
NUMBERS = 5
"""How many numbers a meeting sums."""


class Meeting:
    """The sum of up to `NUMBERS` `numbers` over `group`, under way; `wait` gives it."""

    def __init__(self, call: Call, numbers: Sequence[float], group: Collective, *, device: torch.device) -> None:
        self._call, self._size = CALLS.index(call), group.size
        self._handle: Handle | None = None
        own = [0.0] * (len(CALLS) + NUMBERS)
        own[self._call] = 1.0
        own[len(CALLS) : len(CALLS) + len(numbers)] = numbers
        self._own = own
        if group.size > 1:
            self._sums = torch.tensor(own, dtype=torch.float64, device=device)
            self._handle = group.all_reduce(self._sums)

    def wait(self) -> list[float]:
        """The sums. Raises `UserCodeError`, on every rank, where not all of them are in the same call."""
        if self._handle is None:
            return self._own[len(CALLS) :]
        self._handle.wait()
        sums = self._sums.tolist()
        if sums[self._call] != self._size:
            said = [f"{int(ranks)} in {call}" for call, ranks in zip(CALLS, sums, strict=False) if ranks]
            raise UserCodeError(
                f"of {self._size} ranks {' and '.join(said)}: every rank makes the same calls of its run in the same "
                "order; let no `if` that is true on one rank alone decide on a `break` or on such a call"
            )
        return sums[len(CALLS) :]


def meet(call: Call, group: Collective, *, device: torch.device, number: float = 0.0) -> float:
    """The sum of `number` over `group`, once all of its ranks are in `call`. Raises what `Meeting.wait` does."""
    return Meeting(call, [number], group, device=device).wait()[0]
