"""`Action`: one computation of one stage on one microbatch, the atom of every schedule.

    F  forward
    B  backward: the gradients of the input and of the weights, in one go
    I  the gradient of the input only, which the stage before waits for
    W  the gradients of the weights only, which nobody waits for until the step ends (arXiv:2401.10241)

B is I and W together: a stage does either B or both I and W on a microbatch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class Action(NamedTuple):
    """`kind` on `microbatch` by `stage`; stages and microbatches count from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"
