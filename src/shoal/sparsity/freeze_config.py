"""Table `[freeze]`. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from shoal.config.table import Positive, Table, says


class FreezeLater(Table, frozen=True, kw_only=True):
    """Layers that are frozen for a part of the run."""

    layers: Annotated[tuple[str, ...], says("Patterns of names, as in `freeze.layers`.", min_length=1)]
    at: Annotated[int, says("The first step in which they are frozen.", ge=1)]
    until: Annotated[Positive | None, says("The step in which they are trained again; default: never.")] = None

    def __post_init__(self) -> None:
        if self.until is not None and self.until <= self.at:
            raise ValueError(f"until = {self.until} is not after at = {self.at}: raise it, or leave it out")


class FreezeByProgress(Table, frozen=True, kw_only=True):
    """Blocks are frozen from the front when they hardly change any more."""

    every: Annotated[int, says("Every so many steps blocks are compared with what they were.", ge=1)] = 100
    below: Annotated[
        float,
        says(
            "A block has settled when it moves less, for its size and the learning rate, than this share of the most "
            "that it ever did.",
            gt=0,
            lt=1,
        ),
    ] = 0.2
    patience: Annotated[int, says("Comparisons in a row after which a settled block is frozen.", ge=1)] = 3
    most: Annotated[float, says("Share of the blocks that may be frozen.", gt=0, lt=1)] = 0.75
    thaw: Annotated[
        float, says("Frozen blocks are trained again when the learning rate has fallen by this factor.", gt=1)
    ] = 10.0


class FreezeConfig(Table, frozen=True, kw_only=True):
    """Layers that are not trained: no gradient is computed, sent or kept for them, and no optimizer state."""

    layers: Annotated[
        tuple[str, ...],
        says("Patterns of names of parameters or modules (`embedding`, `blocks.0`) that are never trained."),
    ] = ()
    train: Annotated[tuple[str, ...], says("Patterns of what is trained though `layers` matches it.")] = ()
    later: Annotated[tuple[FreezeLater, ...], says("Layers that are frozen for a part of the run.")] = ()
    progress: Annotated[
        FreezeByProgress | None, says("Freezes blocks from the front when they hardly change any more.")
    ] = None

    def __post_init__(self) -> None:
        if not (self.layers or self.later or self.progress):
            raise ValueError("nothing is frozen: give layers, later or progress, or leave the table out")

    @property
    def changes(self) -> bool:
        """Whether what is frozen changes in the run."""
        return bool(self.later) or self.progress is not None
