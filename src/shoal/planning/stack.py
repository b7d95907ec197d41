"""The training program that a run file makes of Shoal, as predictions see it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from shoal import units
from shoal.checkpoint.config import MOMENT_SLOTS
from shoal.codec.config import SignConfig
from shoal.cost.footprint import AUTOCAST, FLOAT32, FLOAT64, MASTERS, StateBytes
from shoal.cost.transformer import Transformer, embedding_parameters, head_parameters, total_parameters
from shoal.engine.config import BFloat16, BFloat16Params, Float8, Float16, Float32, Float64
from shoal.errors import ConfigError, LayoutError
from shoal.models.config import GPTConfig, ModelConfig, MoEConfig
from shoal.optim.config import OneBit, in_8_bits
from shoal.planner.explain.text import Change
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.predict.stack import Codecs, Stack
from shoal.planner.search.candidates import Allowed
from shoal.planner.search.search import Found, search
from shoal.planning.plan_file import runnable
from shoal.runfile.run_file import RunFile
from shoal.topology.calibration import CodecTime
from shoal.topology.cluster import Cluster

# The sizes of a run file's model, as the planner's closed forms take them.


def transformer_of(model: ModelConfig, *, expert_imbalance: float = 1.0) -> Transformer:
    """The sizes of a GPT or mixture, of which the fullest expert gets `expert_imbalance` times the mean. Raises
    `ConfigError` for other models."""
    if not isinstance(model, GPTConfig):
        kind = model.variant
        raise ConfigError(f'model.kind = "{kind}": only "gpt" and "moe", whose sizes the run file tells, are simulated')
    sizes = Transformer(
        layers=model.layers,
        hidden=model.width,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        head_size=model.size_of_head,
        feed_forward=model.hidden_width,
        vocabulary=model.vocabulary,
        gated=model.feed_forward == "swiglu",
        tied=model.tied,
    )
    return _mixture(sizes, model, expert_imbalance) if isinstance(model, MoEConfig) else sizes


def _mixture(sizes: Transformer, model: MoEConfig, imbalance: float) -> Transformer:
    mixed = (model.layers - model.first_dense) // model.moe_every
    most = math.inf if model.capacity_factor is None else max(1.0, model.capacity_factor)
    return replace(
        sizes,
        feed_forward=model.width_of_expert,
        experts=model.experts,
        experts_per_token=model.top_k,
        shared_feed_forward=model.shared_experts * model.width_of_expert,
        dense_layers=model.layers - mixed,
        dense_feed_forward=model.hidden_width,
        expert_imbalance=min(imbalance, most),
    )


def hidden_share(model: ModelConfig) -> float:
    """The share of the parameters that are neither embeddings nor the head; 1 of a model whose sizes are not known."""
    if not isinstance(model, GPTConfig):
        return 1.0
    sizes = transformer_of(model)
    return 1 - (embedding_parameters(sizes) + head_parameters(sizes)) / total_parameters(sizes)


def flops_of_a_number(run_file: RunFile) -> float:
    """What the optimizer computes for a number of a block's matrices, beyond passes; 0 where sizes are not known."""
    if not isinstance(run_file.model, GPTConfig):
        return 0.0
    sizes = transformer_of(run_file.model)
    keys, width = sizes.kv_heads * sizes.head_size, sizes.hidden
    matrices = [(width, width), (keys, width), (keys, width), (width, width), (width, sizes.feed_forward)]
    matrices += [(sizes.feed_forward, width)] * (2 if sizes.gated else 1)
    flops = sum(run_file.optimizer.matrix_flops(*shape) for shape in matrices)
    return flops / sum(rows * columns for rows, columns in matrices)


MASK_BYTES = 1 + 1 / 8
"""Of a weight: a byte where it is updated, and a bit (`shoal.sparsity.masks`)."""


def masked_share(run_file: RunFile) -> float:
    """The share of the parameters that `[sparsity]` masks."""
    config = run_file.sparsity
    if config is None:
        return 0.0
    if isinstance(run_file.model, GPTConfig) and config.layers is None and not config.removes:
        return hidden_share(run_file.model)
    from shoal.planning.tracing import traced_masked_share  # imports torch, and the user's own code

    return traced_masked_share(run_file)


_STATES: Mapping[type, tuple[StateBytes, str]] = {
    Float32: (FLOAT32, "float32"),
    Float64: (FLOAT64, "float64"),
    BFloat16: (AUTOCAST, "bfloat16"),
    BFloat16Params: (MASTERS, "bfloat16"),
    Float16: (AUTOCAST, "float16"),
    Float8: (AUTOCAST, "bfloat16"),
}

FLOAT_BYTES = 4
HALF_BYTES = 2
CODED_BYTES = 112.0
"""Read and written for a number of a moment in 8 bits by torch's operators, counted: 21 as it is decoded, 29 as it is
encoded, and half of the 124 of the update's own that one kernel would not move."""
CODED_ON_CORES = 32.0
"""The same of the loop in C, which computes for as long as so many bytes take (`benchmarks/adamw_8bit.py`)."""


MOVED_PASSES = 4
"""State that comes and goes is read and written on either way."""
PARTS = 3
"""Parts of the parameters whose state is on the device at a time (`shoal.memory.streamed_state`)."""


def stack_of(run_file: RunFile, cluster: Cluster, *, times: tuple[CodecTime, ...] = ()) -> Stack:
    """What Shoal does: PyTorch's fused attention, gradients summed while the backward runs, eager operators.

    The optimizer keeps what its slots declare. Its step reads the gradient for the norm, reads and writes it where it
    is clipped, reads it again, and reads and writes the weight and every slot: ten numbers for a clipped AdamW. A slot
    in 8 bits is decoded and encoded, too. Masks count as its own; packed slots have what the first update trains.
    Ranks on CPU cores move bytes with the cores that compute, so that nothing hides behind anything but what a network
    moves. `times` of coding were measured on such cores.
    """
    on_cpu = cluster.machine.scale_up.kind == "memory"
    state, dtype = _STATES[type(run_file.precision)]
    if isinstance(run_file.precision, BFloat16Params) and run_file.precision.reduce_dtype == "bfloat16":
        state = replace(state, wire=HALF_BYTES)
    number = max(state.weight, FLOAT_BYTES)  # of what the optimizer steps
    rounded = number + state.weight if state.masters else 0.0  # masters are read, weights written
    slots, hidden = run_file.optimizer.all_slots, hidden_share(run_file.model)
    kept = [slot.number_bytes for slot in slots if slot.number_bytes is not None]
    plain = sum(slot.planned_numbers(hidden) for slot in slots if slot.number_bytes is None)
    moved = 4 + 2 * plain + (2 if run_file.optimizer.clip_norm else 0)
    config, masked = run_file.sparsity, masked_share(run_file)
    left = 1.0 if config is None or not config.packed_state else 1 - masked * (1 - config.first_trained)
    masks = 0.0 if config is None else masked * (config.masks * MASK_BYTES + config.numbers * number)
    coded = len(kept) * (CODED_ON_CORES if on_cpu else CODED_BYTES)
    optimizer, offload = plain * number * left + sum(kept) + masks, run_file.memory.offload
    away = offload.optimizer != "device"
    copied = MOVED_PASSES * optimizer if away and on_cpu else 0.0
    state = replace(
        state,
        optimizer=optimizer + (number if state.masters else 0.0),
        streamed_bytes=PARTS * offload.part_bytes * optimizer / number if away else None,
        saved=plain * number + len(kept) * FLOAT_BYTES + number - state.weight if kept or state.masters else None,
    )
    return Stack(
        name="Shoal",
        state=replace(state, written=_written(run_file, state.in_checkpoint)),
        dtype=dtype,
        update_bytes=moved * number + rounded + coded + copied,
        update_flops=hidden * flops_of_a_number(run_file),
        backwards=run_file.optimizer.backwards,
        state_home=offload.optimizer,
        eager=not run_file.run.compile,
        own_blocks=not run_file.run.compile,
        stops_early=True,
        balances_stages=True,
        attention="flash-2",
        eager_loss=True,
        dropout=getattr(run_file.model, "dropout", 0.0) > 0,
        fused_weight_gradient=False,
        overlap_tensor=False,
        overlap_data=not on_cpu,
        overlap_network=on_cpu,
        overlap_pipeline=not on_cpu,
        scatter_pipeline=False,
        agreements=3,
        crossing_copies=1,
        context=run_file.context.kind if on_cpu else None,
        float8="dense" if isinstance(run_file.precision, Float8) else "none",
        codecs=codecs_of(run_file, times=times, one_host=cluster.nodes == 1),
    )


EXPONENT_BYTES = 0.67
"""What planes of bytes save of a trained number, whatever its type: most of its exponent (decision 84)."""
DIFFERENCE_BYTES = 0.84
"""The same of differences from a checkpoint some ten steps before."""
CODED_MOMENT_BYTES = 0.92
"""Of a moment in 8 bits, with its scales, in planes."""


def _written(run_file: RunFile, in_checkpoint: float) -> float | None:
    """Bytes of a parameter in a checkpoint of fewer bytes; None where numbers are written as they are."""
    config, number = run_file.checkpoint, FLOAT_BYTES
    if config.compress == "none":
        return None
    if isinstance(run_file.precision, Float64):
        number = 2 * FLOAT_BYTES
    narrow = [slot for slot in run_file.optimizer.all_slots if slot.name in MOMENT_SLOTS]
    moments = len(narrow) if config.moments == "8bit" and number == FLOAT_BYTES else 0
    saved = EXPONENT_BYTES if config.compress == "planes" else DIFFERENCE_BYTES
    return moments * CODED_MOMENT_BYTES + (in_checkpoint / number - moments) * (number - saved)


def codecs_of(run_file: RunFile, *, times: tuple[CodecTime, ...], one_host: bool) -> Codecs:
    """What the run codes on the wire; an optimizer that sends its momentum sends it in one bit."""
    optimizer, buckets = run_file.optimizer, run_file.gradients
    momentum = isinstance(optimizer, OneBit)
    return Codecs(
        gradients=SignConfig(block=optimizer.block) if momentum else run_file.codec,
        pieces=run_file.shard_codec,
        stages=run_file.pipeline.stage_codec,
        bucket_bytes=float((buckets if one_host else buckets.between_hosts()).bucket_size),
        times=times,
    )


# What another optimizer would change in a plan: moments in 8 bits in the place of AdamW's.


def with_optimizer(predictor: Predictor, run_file: RunFile) -> Predictor:
    """The same with what the optimizer of `run_file` keeps and moves."""
    stack, other = predictor.stack, stack_of(run_file, predictor.cluster)
    kept = other.state
    state = replace(stack.state, optimizer=kept.optimizer, saved=kept.saved, streamed_bytes=kept.streamed_bytes)
    if state == stack.state and other.update_bytes == stack.update_bytes:
        return predictor
    changed = replace(
        stack, state=state, update_bytes=other.update_bytes, update_flops=other.update_flops,
        backwards=other.backwards, state_home=other.state_home,
    )  # fmt: skip
    return predictor.on(predictor.cluster, measured=predictor.measured, stack=changed)


def _in_8_bits(run_file: RunFile, predictor: Predictor) -> tuple[str, Predictor] | None:
    """The key that brings moments to 8 bits, and what prices it; None where they cannot be, or are."""
    optimizer = in_8_bits(run_file.optimizer)
    if optimizer is None:
        return None
    changed = msgspec.structs.replace(run_file, optimizer=optimizer)
    return f'optimizer.kind = "{optimizer.variant}"', with_optimizer(predictor, changed)


def search_with(run_file: RunFile, predictor: Predictor, allowed: Allowed, *, keep: int) -> Found:
    """The fastest plans of a run file. Raises `LayoutError` where nothing fits, with what would fit with moments in 8
    bits.
    """
    legal = runnable(run_file, predictor.cluster)
    try:
        return search(predictor, allowed, keep=keep, legal=legal)
    except LayoutError as error:
        other, best = _in_8_bits(run_file, predictor), None
        with contextlib.suppress(LayoutError):
            best = search(other[1], allowed, keep=1, legal=legal).best[0] if other else None
        if other is None or best is None:
            raise
        size = units.memory_size(best.memory_bytes)
        raise LayoutError(f"{error}; with {other[0]}, {best.plan.describe()} fits in {size}") from error


def optimizer_changes(run_file: RunFile, predictor: Predictor, best: Prediction) -> list[Change]:
    """Moments in 8 bits, as a change of the best plan."""
    other = _in_8_bits(run_file, predictor)
    if other is None:
        return []
    one = other[1].predict(best.plan)
    caveat = "moments are rounded to 8 bits"
    return [Change(what=other[0], step_s=one.step_s, memory_bytes=one.memory_bytes, fits=one.fits, caveat=caveat)]
