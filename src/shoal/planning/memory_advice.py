"""What would free memory on the fullest rank of a run that ran out of it, by the planner's closed forms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from shoal.errors import ShoalError
from shoal.optim.config import in_8_bits
from shoal.planner.predict.predictor import Predictor
from shoal.planning.answer import predictor_on, tensor_bytes
from shoal.planning.plan_file import chunk_choices, written_plan
from shoal.planning.stack import with_optimizer
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile
from shoal.topology.cluster_file import cluster_from

GIB, MIB = 1 << 30, 1 << 20
_KEYS = {
    "batch.micro_samples": "smaller microbatches",
    "memory.recompute": "activations computed again in the backward",
    "memory.loss_chunks": "logits of a part of the tokens at a time",
    "memory.offload.optimizer": "the optimizer's state on the host",
    "layout.shard": "model and optimizer split over the ranks",
}


def memory_advice(run_file: RunFile) -> str:
    """A sentence for each change that helps, most first; of a model that the planner cannot price, the keys alone.

    `run_file` says how many ranks there are. Models other than a GPT are traced, which takes seconds and no memory.
    """
    saved = sorted(_saved(run_file), reverse=True)
    if not saved:
        return "What frees memory: " + "; ".join(f"{key} ({what})" for key, what in _KEYS.items())
    changes = "; ".join(f"{change} {_size(saved_bytes)}" for saved_bytes, change in saved)
    return f"What frees how much on the fullest rank: {changes}"


def _size(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.1f} MiB"


def _saved(run_file: RunFile) -> Iterator[tuple[float, str]]:
    with contextlib.suppress(ShoalError):  # this run cannot be priced
        predictor = predictor_of_ranks(run_file)
        now = fullest_bytes(predictor, run_file)
        for change, changed in _changes(run_file):
            with contextlib.suppress(ShoalError):  # it cannot be run so
                saved_bytes = now - fullest_bytes(with_optimizer(predictor, changed), changed)
                if saved_bytes > 0:
                    yield saved_bytes, change


def predictor_of_ranks(run_file: RunFile) -> Predictor:
    """For the bytes of the run's ranks, on whatever devices. Raises `ShoalError` where the run cannot be priced."""
    table = {"nodes": 1, "machine": "cpu-2", "devices_per_node": run_file.run.processes, "name": "the ranks"}
    return predictor_on(run_file, cluster_from({"cluster": table}, file="the ranks"))


def fullest_bytes(predictor: Predictor, run_file: RunFile) -> float:
    """What tensors of the fullest rank take. Raises `ShoalError` where the run file cannot be priced."""
    return max(map(tensor_bytes, predictor.footprints(written_plan(run_file, predictor.cluster))))


def _changes(run_file: RunFile) -> Iterator[tuple[str, RunFile]]:
    """Each a key with its value, and the run file with it."""
    replaced, layout = msgspec.structs.replace, run_file.layout.layout(run_file.run.processes or 1)
    micro = run_file.batch.micro_samples or run_file.batch.global_samples // (layout.replicate * layout.shard)
    if micro > 1:
        batch = replaced(run_file.batch, micro_samples=micro // 2)
        yield f"batch.micro_samples={micro // 2}", replaced(run_file, batch=batch)
    for kind in ("selective", "operators", "full"):
        if run_file.memory.recompute == "none":
            memory = replaced(run_file.memory, recompute=kind)
            yield f'memory.recompute="{kind}"', replaced(run_file, memory=memory)
    for chunks in chunk_choices(run_file)[1:]:
        memory = replaced(run_file.memory, loss_chunks=chunks)
        yield f"memory.loss_chunks={chunks}", replaced(run_file, memory=memory)
    if layout.replicate > 1:
        shard = layout.shard * layout.replicate
        split = replaced(run_file.layout, replicate=1, shard=shard)
        yield f"layout.replicate=1 layout.shard={shard}", replaced(run_file, layout=split)
    if run_file.optimizer.updates_apart and run_file.memory.offload.optimizer == "device":
        offload = replaced(run_file.memory.offload, optimizer="host")
        moved = replaced(run_file, memory=replaced(run_file.memory, offload=offload))
        if refusal(moved) is None:
            yield 'memory.offload.optimizer="host"', moved
    if (optimizer := in_8_bits(run_file.optimizer)) is not None:
        yield f'optimizer.kind="{optimizer.variant}"', replaced(run_file, optimizer=optimizer)
