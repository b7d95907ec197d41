"""A run file in small, with every form that a table can have."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.config.check import PositiveFloat, Table, says


class Big(Table, tag_field="kind", tag="big"):
    """The big one."""

    width: Annotated[int, says("How wide.", ge=1)] = 10

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"width = {self.width}; it must be even, such as {self.width + 1}")


class Small(Table, tag_field="kind", tag="small"):
    """The small one."""

    names: Annotated[list[str], says("Names.")] = msgspec.field(default_factory=list)


class Place(Table):
    """Where."""

    name: Annotated[str, says("What it is called.")]
    steps: Annotated[int, says("How many.", ge=1, le=100)] = 3
    rate: Annotated[PositiveFloat | None, says("How fast.")] = None
    order: Annotated[Literal["up", "down"], says("Which way.")] = "up"


class Root(Table):
    """All of it."""

    place: Place
    thing: Annotated[Big | Small, says("The thing.")] = Big()
