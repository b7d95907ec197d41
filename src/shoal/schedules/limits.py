"""Which sizes a schedule takes, in sentences that offer the nearest that work."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from shoal.errors import ConfigError, LayoutError


def check_name(name: str, known: tuple[str, ...]) -> None:
    """Raises `ConfigError` for a schedule that does not exist."""
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"schedule {name!r} is not known: it is one of {', '.join(known)}{meant}")


def check_size(what: str, size: int) -> None:
    """Raises `LayoutError` unless there is one at least."""
    if size < 1:
        raise LayoutError(f"{size} {what}: a pipeline has at least 1; set 1 or more")


def check_stages_per_rank(name: str, given: int, required: int) -> None:
    """Raises `LayoutError` for a schedule whose number of stages a rank is not free."""
    if given != required:
        raise LayoutError(
            f"{name} with {given} stages per rank: it places exactly {required} on each; set {required}, or choose "
            f"Interleaved1F1B, which takes any number"
        )


def round_size(microbatches: int, ranks: int) -> int:
    """How many microbatches go through a stage before the next stage's turn: `ranks`, or a little more."""
    return microbatches // max(1, microbatches // ranks)


def fits_rounds(microbatches: int, ranks: int) -> bool:
    """Whether the microbatches fall into floor(microbatches / ranks) equal rounds."""
    return microbatches % max(1, microbatches // ranks) == 0


def check_rounds(name: str, microbatches: int, ranks: int) -> None:
    """Raises `LayoutError` unless `fits_rounds`; every multiple of `ranks` and every number below 2 ranks does."""
    if not fits_rounds(microbatches, ranks):
        near = _nearest(microbatches, lambda number: fits_rounds(number, ranks))
        raise LayoutError(
            f"{name} with {microbatches} microbatches on {ranks} ranks: they go in {microbatches // ranks} equal "
            f"rounds, which does not divide {microbatches}; nearest: {near}"
        )


def check_enough(name: str, microbatches: int, ranks: int) -> None:
    """Raises `LayoutError` unless there are as many microbatches as stages of a V."""
    if microbatches < 2 * ranks:
        raise LayoutError(
            f"{name} with {microbatches} microbatches on {ranks} ranks: its two stages a rank need at least "
            f"{2 * ranks}; set {2 * ranks} or more, or choose ZBVZeroBubble, which takes any number"
        )


def _nearest(size: int, works: Callable[[int], bool]) -> str:
    below = next((n for n in range(size - 1, 0, -1) if works(n)), None)
    above = next(n for n in range(size + 1, 2 * size + 2) if works(n))
    return f"{above}" if below is None else f"{below} or {above}"
