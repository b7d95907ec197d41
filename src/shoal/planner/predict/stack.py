"""What a training stack does and does not do: facts of its source or its paper, not fits.

A prediction for a published table must know which of these the measured program had; a run of Shoal knows its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.codec.config import BlockwiseConfig, CastConfig, CodecConfig, NoCodec, ShardCodecConfig
from shoal.cost.activations import Kept
from shoal.cost.footprint import MEGATRON_BF16, StateBytes
from shoal.cost.matmul import Float8Casts, Kernel
from shoal.cost.operators import Float8
from shoal.planner.predict.measured import ContextKind
from shoal.topology.calibration import CodecTime

UNCODED, WHOLE_PIECES = NoCodec(), ShardCodecConfig()


# What a program codes on the wire, as data: the tables of a run file that say so, and what was measured of them.


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """`gradients` codes sums over replicas, in buckets of `bucket_bytes`; `pieces` what ZeRO's ranks send each other;
    `stages` activations and their gradients between pipeline stages. `times` were measured on such a device.
    """

    gradients: CodecConfig = UNCODED
    pieces: ShardCodecConfig = WHOLE_PIECES
    stages: CastConfig | BlockwiseConfig | None = None
    bucket_bytes: float = 25 * 2**20
    times: tuple[CodecTime, ...] = ()


NOTHING_CODED = Codecs()


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A training program.

    `overlap_tensor`: the all-reduce of an input's gradient runs beside the weight's product. `overlap_data`: gradients
    are summed, and ZeRO's weights gathered, while the device computes. `overlap_network`: sums between nodes are, even
    where `overlap_data` is not: a network works beside the cores that compute. `overlap_pipeline`: transfers between
    stages run beside computation. `scatter_pipeline`: tensor ranks send a share each (arXiv:2104.04473, section 4.1).
    `eager`: gates and rotary positions are a kernel an operator. `own_blocks`: its blocks are this project's eager
    ones, whose memory has forms of its own. `fused_loss`: one kernel computes the cross-entropy from logits of the
    stack's dtype. `eager_loss`: PyTorch's, of logits that are cast to float32 first. `attention`: the kernel of its
    fused attention. `stops_early`: full recomputation ends before a block's last product, whose result the backward
    does not need (PyTorch's non-reentrant checkpoint). `balances_stages`: the last stages have fewer layers to make
    room for the head; else all have as many. `agreements`: sums of a few numbers over all ranks in a step.
    `crossing_copies`: copies of an activation that a collective between tensor ranks makes. `gathers_each`: under
    sequence parallelism every column layer gathers its input for itself, though several have the same. `whole_loss`:
    tensor ranks gather the logits and compute the whole loss each. `context`: how context ranks exchange keys and
    values, all of it seen; None: gathers of keys, hidden behind attention. `update_bytes`: what a step of the
    optimizer moves for a parameter, Megatron's by default: copy of the gradient 6, unscale and norm 12, Adam in
    float32 28, cast to half 6; `update_flops`: what
    it computes beyond that, all ranks that hold a parameter together. `backwards`: forwards and backwards of a step
    for each of its microbatches. `float8`: which linear layers of a block compute in float8, `float8_casts` whose they
    are; `gathers_float8`: ZeRO gathers their weights in it. `codecs`: what is coded on the wire. `state_home`:
    where the optimizer's state lives between updates.
    """

    name: str
    state: StateBytes
    dtype: str = "bfloat16"
    update_bytes: float = 52.0
    update_flops: float = 0.0
    backwards: float = 1.0
    state_home: Literal["device", "host", "disk"] = "device"
    eager: bool = False
    own_blocks: bool = False
    stops_early: bool = False
    balances_stages: bool = False
    flash_attention: bool = True
    attention: Kernel = "best"
    dropout: bool = False
    fused_weight_gradient: bool = True
    fused_loss: bool = False
    eager_loss: bool = False
    overlap_tensor: bool = True
    overlap_data: bool = True
    overlap_network: bool = False
    overlap_pipeline: bool = True
    scatter_pipeline: bool = True
    agreements: int = 0
    crossing_copies: int = 0
    gathers_each: bool = False
    whole_loss: bool = False
    context: ContextKind | None = None
    float8: Float8 = "none"
    float8_casts: Float8Casts = "torchao"
    gathers_float8: bool = False
    codecs: Codecs = NOTHING_CODED

    @property
    def kept(self) -> Kept:
        """What its forward keeps for its backward."""
        return Kept(
            element_bytes=self.state.activation,
            stream_bytes=self.state.stream,
            eager=self.eager,
            dropout=self.dropout,
            flash_attention=self.flash_attention,
            fused_loss=self.fused_loss,
            eager_loss=self.eager_loss,
            whole_loss=self.whole_loss,
        )


MODERN = Stack(name="flash attention, fused and overlapped", state=MEGATRON_BF16)
