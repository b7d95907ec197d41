"""The training program that a run file makes of Shoal, as predictions see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal.codec.config import SignConfig
from shoal.cost.footprint import AUTOCAST, FLOAT32, FLOAT64, StateBytes
from shoal.engine.config import BFloat16, Float8, Float16, Float32, Float64
from shoal.optim.config import OneBit
from shoal.planner.predict.stack import Codecs, Stack
from shoal.planning.sizes import hidden_share
from shoal.runfile.run_file import RunFile
from shoal.topology.calibration import CodecTime
from shoal.topology.cluster import Cluster

_STATES: Mapping[type, tuple[StateBytes, str]] = {
    Float32: (FLOAT32, "float32"),
    Float64: (FLOAT64, "float64"),
    BFloat16: (AUTOCAST, "bfloat16"),
    Float16: (AUTOCAST, "float16"),
    Float8: (AUTOCAST, "bfloat16"),
}

FLOAT_BYTES = 4
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
    in 8 bits is decoded and encoded, too.
    Ranks on CPU cores move bytes with the cores that compute, so that nothing hides behind anything but what a network
    moves. `times` of coding were measured on such cores.
    """
    on_cpu = cluster.machine.scale_up.kind == "memory"
    state, dtype = _STATES[type(run_file.precision)]
    slots, hidden = run_file.optimizer.all_slots, hidden_share(run_file.model)
    kept = [slot.number_bytes for slot in slots if slot.number_bytes is not None]
    plain = sum(slot.planned_numbers(hidden) for slot in slots if slot.number_bytes is None)
    moved = 4 + 2 * plain + (2 if run_file.optimizer.clip_norm else 0)
    coded = len(kept) * (CODED_ON_CORES if on_cpu else CODED_BYTES)
    optimizer, offload = plain * state.weight + sum(kept), run_file.memory.offload
    away = offload.optimizer != "device"
    copied = MOVED_PASSES * optimizer if away and on_cpu else 0.0
    return Stack(
        name="Shoal",
        state=replace(
            state,
            optimizer=optimizer,
            streamed_bytes=PARTS * offload.part_bytes * optimizer / state.weight if away else None,
            saved=plain * state.weight + len(kept) * FLOAT_BYTES if kept else None,
        ),
        dtype=dtype,
        update_bytes=moved * state.weight + coded + copied,
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
