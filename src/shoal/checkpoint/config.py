"""The `[checkpoint]` table of the run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from shoal.config.check import Table, says

MOMENT_SLOTS = ("exp_avg", "exp_avg_sq")
"""Slots of optimizers that `checkpoint.moments` may write in 8 bits: with signs, and without."""


class Goal(Table, frozen=True):
    """A measurement of evaluations, and which values of it are the better ones."""

    measurement: Annotated[str, says("What each evaluation measures, such as `loss/eval` or `accuracy/eval`.")] = (
        "loss/eval"
    )
    goal: Annotated[Literal["minimize", "maximize"], says("Whether a lower value is better, or a higher one.")] = (
        "minimize"
    )

    def is_better(self, value: float, than: float | None, *, by: float = 0.0) -> bool:
        """Whether `value` is better than the best so far (None: there is none), by more than `by`. NaN never is."""
        if than is None:
            return value == value
        return value < than - by if self.goal == "minimize" else value > than + by


class CheckpointConfig(Table, frozen=True):
    """When a run saves, how much of the past it keeps, and how large its files are."""

    every_steps: Annotated[
        int, says("Optimizer steps between two checkpoints; 0 saves only at the end and on a signal.", ge=0)
    ] = 200
    every: Annotated[
        Literal["steps", "auto"],
        says(
            "steps: a checkpoint every `every_steps`. auto: the first after `every_steps`, then by Daly's formula from "
            "the measured time of steps and saves and the failures of this run."
        ),
    ] = "steps"
    expected_failure_s: Annotated[
        float, says("auto: mean seconds between two failures, until the run has seen some.", gt=0)
    ] = 86400.0
    keep: Annotated[int, says("How many checkpoints stay on the disk; older ones are deleted.", ge=1)] = 3
    keep_best: Annotated[
        Goal | None,
        says(
            "Save after each evaluation that is better than all before, and keep the best checkpoint beside the "
            "newest: `checkpoints/best` in the run directory. Default: none."
        ),
    ] = None
    object_bytes: Annotated[
        int, says("Largest file that tensors are cut or packed into, in bytes.", ge=1 << 16, le=1 << 30)
    ] = 8 << 20
    staging: Annotated[
        Literal["auto", "memory", "disk"],
        says(
            "Where a rank's share of a save is laid out, for which alone training waits. memory: in the host's, which "
            "it then keeps. disk: in files beside the objects, which they become; for shares that are larger than the "
            "host's memory. auto: disk where `memory.offload` has state on disk."
        ),
    ] = "auto"
    compress: Annotated[
        Literal["none", "planes", "deltas"],
        says(
            "planes: numbers are written without loss in fewer bytes, exponents apart from mantissas: of float32 about "
            "a sixth is saved, of bfloat16 a third. deltas: beside that, where it is less, what differs from an "
            "earlier checkpoint, of which each rank keeps its share in the host's memory, and which stays on the disk."
        ),
    ] = "none"
    full_every: Annotated[
        int, says("deltas: every so many checkpoints one holds all numbers, and the next ones differ from it.", ge=2)
    ] = 4
    moments: Annotated[
        Literal["exact", "8bit"],
        says(
            "8bit: Adam's moments are written in 8 bits a number, to within 1.1 % (first) and 0.6 % (second) of the "
            "largest in a block of 256; a resumed run differs by that. Needs `compress`."
        ),
    ] = "exact"
    remote: Annotated[
        str | None,
        says(
            "URL below which copies of the checkpoints are kept, such as `s3://bucket/run` (extra `data`). They are "
            "sent behind training; a start in an empty run directory resumes from the newest."
        ),
    ] = None
    remote_options: Annotated[
        dict[str, Any], says("Keywords of fsspec's file system, such as an endpoint; keep secrets in the environment.")
    ] = msgspec.field(default_factory=dict)
    remote_attempts: Annotated[int, says("How often a failed request is made before a copy is given up.", ge=1)] = 10

    def __post_init__(self) -> None:
        if self.moments == "8bit" and self.compress == "none":
            raise ValueError('moments = "8bit" needs compress: set that to "planes", or keep "exact"')
        if self.staging == "disk" and self.compress == "deltas":
            raise ValueError(
                'staging = "disk" with compress = "deltas", which keeps a rank\'s share in memory: set compress to '
                '"planes", or staging to "memory"'
            )
