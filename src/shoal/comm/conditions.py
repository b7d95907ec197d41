"""Conditions that tests and labs put on a wire: faults at a chosen call, and rates that the wire cannot exceed.

They are an argument of the seam. A run without them pays nothing for their existence.

Rates between hosts (`HostRates`) stand in for real links where there are none: a rank's `wait` comes back no sooner
than the bytes that this rank sends to other hosts would be through, those of all its groups one after the other. That
is an approximation: the ranks of a host do not share its link, what a rank receives is not delayed by it, and there is
no latency.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from shoal.comm.ledger import Sent
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
class HostRates:
    """`hosts[r]` is the host of rank r of the world; `bytes_s[a][b]` the rate from host a to host b."""

    hosts: Sequence[int]
    bytes_s: Sequence[Sequence[float]]

    def slowest(self, ranks: Sequence[int], rank: int) -> float | None:
        """Of the links from the host of `rank` to the other hosts of `ranks`; None where there is no other."""
        here = self.hosts[rank]
        others = {self.hosts[other] for other in ranks} - {here}
        return min((self.bytes_s[here][other] for other in others), default=None)


class PacedLink:
    """When the link of one rank is free again, by `time.perf_counter`; a copy in another process is another link."""

    def __init__(self) -> None:
        self._lock, self._free_s = threading.Lock(), 0.0

    def __reduce__(self) -> tuple[type[PacedLink], tuple[()]]:
        return PacedLink, ()

    def busy(self, wire_s: float) -> float:
        """Takes it for so long, as soon as it is free. Returns when it will be through."""
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + wire_s
            return self._free_s


@dataclass(frozen=True)
class Conditions:
    """What a wire is like. Completion is delayed so that no more bytes go through than the rates allow.

    `bytes_per_second` bounds everything that a rank sends, `between_bytes_per_second` what goes to other hosts. `rates`
    gives the latter for every group of ranks of the world (`among`). All groups of a rank share its `link`.
    """

    faults: Sequence[Fault] = ()
    bytes_per_second: float | None = None
    between_bytes_per_second: float | None = None
    rates: HostRates | None = None
    link: PacedLink = field(default_factory=PacedLink, compare=False, repr=False)

    def among(self, ranks: Sequence[int], rank: int) -> Conditions:
        """The conditions of `rank` of the world in the group of `ranks`, on the same link."""
        if self.rates is None:
            return self
        return replace(self, between_bytes_per_second=self.rates.slowest(ranks, rank))

    def wire_s(self, sent: Sent) -> float:
        """Seconds that the wire is busy with it at least."""
        whole = sent.bytes_sent / self.bytes_per_second if self.bytes_per_second else 0.0
        between = sent.between_bytes / self.between_bytes_per_second if self.between_bytes_per_second else 0.0
        return max(whole, between)

    def due_s(self, sent: Sent) -> float:
        """Puts `sent` on the link. When it is through, by `time.perf_counter`; 0 where nothing is throttled."""
        wire_s = self.wire_s(sent)
        return self.link.busy(wire_s) if wire_s else 0.0

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
