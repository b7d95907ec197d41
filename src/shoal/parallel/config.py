"""The tables `[pipeline]` and `[context]` of the run file. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from shoal.codec.config import BlockwiseConfig, CastConfig
from shoal.config.check import Positive, Table, says
from shoal.schedules.build import stages_per_rank_of
from shoal.schedules.table import AnySchedule


class PipelineConfig(Table, frozen=True):
    """How microbatches go through the stages of `layout.pipeline` ranks."""

    schedule: Annotated[
        AnySchedule,
        says(
            "Order of forwards and backwards on each rank. PipeDream (SOSP 2019) alone updates the weights after each "
            "microbatch, from gradients of older ones."
        ),
    ] = "1F1B"
    microbatches: Annotated[
        Positive | None, says("Microbatches in one pass through the pipeline; default: twice `layout.pipeline`.")
    ] = None
    stages_per_rank: Annotated[
        Positive | None, says("Stages of each rank; default: 2 for schedules that loop or turn back, else 1.")
    ] = None
    cut: Annotated[
        list[str] | None,
        says(
            'First part of each stage but the first, such as ["blocks.2"]; default: cut to balance the estimated cost.'
        ),
    ] = None

    codec: Annotated[
        Literal["none", "bfloat16", "int8"],
        says(
            "Activations and their gradients between stages of different ranks, on the wire. int8: each number is off "
            "by at most 1/254 of the largest of its block."
        ),
    ] = "none"
    codec_block: Annotated[int, says("Integers that share a scale.", ge=8, le=1 << 20)] = 256

    @property
    def stage_codec(self) -> CastConfig | BlockwiseConfig | None:
        """The codec between stages; None: all is sent as it is."""
        if self.codec == "none":
            return None
        if self.codec == "bfloat16":
            return CastConfig(dtype="bfloat16", feedback=False)
        return BlockwiseConfig(block=self.codec_block, feedback=False)

    @property
    def asynchronous(self) -> bool:
        """Is every microbatch an update of its own?"""
        return self.schedule == "PipeDream"

    @property
    def stages_each(self) -> int:
        """Stages of each rank, the default resolved. Raises `LayoutError` for a number that the schedule refuses."""
        return stages_per_rank_of(self.schedule, self.stages_per_rank)


class ContextConfig(Table, frozen=True):
    """How attention sees the parts of a sequence that other ranks of `layout.context` hold."""

    kind: Annotated[
        Literal["ring", "ulysses", "allgather"],
        says(
            "Keys and values travel round a ring (arXiv:2310.01889), heads are exchanged for sequence "
            "(arXiv:2309.14509), or keys and values are gathered (arXiv:2407.21783). Under a mask of "
            "`[model.attention]` ranks fetch the blocks that they need, unless it is ulysses."
        ),
    ] = "ring"
