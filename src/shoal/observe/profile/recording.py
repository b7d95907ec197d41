"""What one rank did in the profiled steps. All times are seconds of rank 0's clock since the profile began."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step of a rank: from `begin_s`, when it asked for data, to `end_s`; it waited until `data_s` for them.

    `data_cpu_s` is what its process computed before `data_s`, `cpu_s` what it computed after, over all its threads.
    """

    number: int
    begin_s: float
    data_s: float
    end_s: float
    data_cpu_s: float
    cpu_s: float


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """An operator on a thread of the host (`device` -1), or a kernel on a GPU and its stream `thread`."""

    name: str
    thread: int
    begin_s: float
    end_s: float
    device: int = -1


class Called(msgspec.Struct, frozen=True, array_like=True):
    """A collective or a message of this rank, from its start to the moment at which its end was seen."""

    key: str
    operation: str
    ranks: int
    sent_bytes: int
    begin_s: float
    end_s: float


class Waited(msgspec.Struct, frozen=True, array_like=True):
    """This rank stood still for the call of that key; "" where the call is not known."""

    key: str
    operation: str
    begin_s: float
    end_s: float


class Recording(msgspec.Struct, frozen=True):
    """One rank's steps. `thread` is the one that trains; `clock_error_s` is how far its clock may be off.

    `sources` says for operators with much time of their own which line of Python calls them most.
    """

    rank: int
    host: str
    thread: int
    steps: Sequence[Step]
    slices: Sequence[Slice]
    calls: Sequence[Called]
    waits: Sequence[Waited]
    sources: dict[str, str]
    clock_error_s: float = 0.0
