"""Conditions that tests and labs put on a wire: faults at a chosen call, and a rate that the wire cannot exceed.

They are an argument of the seam. A run without them pays nothing for their existence.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shoal.errors import CollectiveError


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at the `call`-th (from 0) `operation` of a rank.

    `late` sleeps for `seconds` first; `fail` raises; `kill` and `stop` signal this very process; `drop` leaves the
    operation out; `corrupt` changes the first element of the payload after the operation was handed over.
    """

    operation: str
    call: int
    kind: Literal["late", "fail", "kill", "stop", "drop", "corrupt"]
    seconds: float = 0.0


@dataclass(frozen=True)
class Conditions:
    """What a wire is like. `bytes_per_second` delays completion so that no more than that goes through."""

    faults: Sequence[Fault] = ()
    bytes_per_second: float | None = None

    def fault(self, operation: str, call: int) -> Fault | None:
        """The fault that is due at this call, if any."""
        return next((f for f in self.faults if f.operation == operation and f.call == call), None)


def before(fault: Fault | None) -> None:
    """What a fault does before its operation starts."""
    if fault is None:
        return
    if fault.kind == "late":
        time.sleep(fault.seconds)
    elif fault.kind == "fail":
        raise CollectiveError(f"injected fault: {fault.operation} call {fault.call}")
    elif fault.kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def after(fault: Fault | None, tensors: Sequence[torch.Tensor]) -> None:
    """What a fault does to the result of its operation."""
    if fault is not None and fault.kind == "corrupt":
        for tensor in tensors:
            tensor.view(-1)[:1] += 1
