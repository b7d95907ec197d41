"""The proof of an optimizer whose moments have 8 bits: every step begins with the moments that the layout has.

Blocks begin where a rank's part of a parameter does. A layout that cuts a parameter within a block rounds its moments
otherwise than one process, and so does a gradient that differs by a last bit now and then; both by a hundredth of them.
The update itself is made before its moments are rounded. So the one process takes the layout's moments before each step
and makes the same update of them, without any tolerance for 8 bits; and the layout's new moments are compared with its
own within `TOLERANCE`, by which both may be off together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from torch import Tensor

from shoal.assembly.run import Run
from shoal.engine.proof import Finding, HeldBox, assembled, compare_weights
from shoal.engine.reference import Reference
from shoal.engine.state import OPTIMIZER
from shoal.optim.config import AdamW, AdamW8bit
from shoal.optim.slots import named_slots
from shoal.runfile.run_file import RunFile
from shoal.state.target import parts_of
from shoal.verification.reference import collected

TOLERANCE = 2**-3
"""Two roundings, each by less than 6 % of a tensor's norm: at worst all numbers of a block but its largest, which is
exact, lie at the lower end of the highest decade of 64 values."""
NOTE = (
    'optimizer.kind = "{}": each step of the one process begins with the moments that the layout has in 8 bits, and so '
    "weights are compared as ever; what the moments become is compared within the rounding of 8 bits"
)
LEFT_OUT = (
    'optimizer.kind = "{}" was taken as "adamw": what 8 bits round depends on the last digits of a gradient, which no '
    "tolerance tells from a mistake after several updates"
)


def rounds_moments(run_file: RunFile) -> bool:
    """Whether the run file's optimizer rounds what it keeps."""
    return isinstance(run_file.optimizer, AdamW8bit)


def without_rounding(run_file: RunFile) -> RunFile:
    """The same run with moments as they are."""
    return msgspec.structs.replace(run_file, optimizer=AdamW(**msgspec.structs.asdict(run_file.optimizer)))


def held_moments(run: Run) -> list[HeldBox]:
    """The moments of all ranks at rank 0, if the optimizer rounds them. All ranks call it, between two steps."""
    if not rounds_moments(run.run_file) or run.workload.optimizers:
        return []
    like = tuple(f"{OPTIMIZER}{slot.name}/" for slot in run.run_file.optimizer.slots if slot.like_parameter)
    own = [
        (name.removeprefix(OPTIMIZER), target.box, target.tensor)
        for name, parts in parts_of(run.state.optimizer.tensors()).items()
        if name.startswith(like)
        for target in parts
    ]
    return collected(run, own)


def give_moments(reference: Reference, moments: Sequence[HeldBox]) -> None:
    """The reference's optimizer goes on with these. Nothing before the first step."""
    own = _moments_of(reference)
    whole = assembled(moments, own) if moments else {}
    for name, parameter in reference.weights.items():
        state = reference.optimizer.state.get(parameter, {})
        state.update({slot: whole[key] for slot in state if (key := f"{slot}/{name}") in whole})


def compare_moments(reference: Reference, number: int, moments: Sequence[HeldBox]) -> Iterator[Finding]:
    """Every rank's moments after the step beside the reference's."""
    if moments:
        yield from compare_weights(number, moments, _moments_of(reference), tolerance=TOLERANCE, quantity="moment")


def _moments_of(reference: Reference) -> dict[str, Tensor]:
    slots = named_slots(reference.optimizer, reference.weights.items())  # pyright: ignore[reportArgumentType]
    return {name: tensor for name, tensor in slots.items() if tensor.dim()}
