"""Recordings made by hand: what each rank did is written down, so that what follows from it is known."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.observe.profile.recording import Called, Recording, Slice, Step, Waited

MAIN = 1


def recording(
    rank: int = 0,
    *,
    data_s: float = 0.0,
    end_s: float = 10.0,
    slices: Sequence[tuple[str, float, float]] = (),
    calls: Sequence[tuple[str, float, float]] = (),
    waits: Sequence[tuple[str, float, float]] = (),
    cpu_s: float = 10.0,
    kernels: Sequence[tuple[str, float, float]] = (),
    ranks: int = 2,
) -> Recording:
    """One step from 0 to `end_s`; spans are (name or key, begin, end)."""
    return Recording(
        rank,
        "here",
        MAIN,
        [Step(1, 0.0, data_s, end_s, 0.0, cpu_s)],
        [
            *(Slice(name, MAIN, begin, end) for name, begin, end in slices),
            *(Slice(name, 7, begin, end, device=0) for name, begin, end in kernels),
        ],
        [Called(key, "all_reduce", ranks, 1000, begin, end) for key, begin, end in calls],
        [Waited(key, "all_reduce", begin, end) for key, begin, end in waits],
        {},
    )
