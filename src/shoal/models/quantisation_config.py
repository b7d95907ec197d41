"""Table `[quantisation]`. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from shoal.config.table import Positive, Table, says


class QuantisationConfig(Table, frozen=True, kw_only=True):
    """Linear layers compute with weights of few bits, as they will once deployed; what is trained stays as it is."""

    bits: Annotated[Literal[8, 4], says("Bits of a weight: integers from -127 to 127, or from -7 to 7.")] = 8
    group: Annotated[
        Positive | None, says("Weights of a row, one after the other, that share a scale; default: the row.")
    ] = None
    layers: Annotated[
        tuple[str, ...],
        says("Patterns of names of linear layers (`blocks.*.query`); default: all but the output head.", min_length=1),
    ] = ("*",)

    @property
    def largest(self) -> int:
        """The largest integer."""
        return 2 ** (self.bits - 1) - 1
