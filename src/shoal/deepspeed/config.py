"""What becomes of each key of DeepSpeed's JSON file.

A key is carried, or has no effect on what is computed (which is said), or is refused with what to do instead. None is
passed over: a key that DeepSpeed does not have is refused, too.

The samples of a step are `train_batch_size`; without it micro x accumulation x ranks, as in DeepSpeed. On another
number of ranks than the file was written for, `train_batch_size` and `train_micro_batch_size_per_gpu` count, and the
accumulation follows from them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.files import read_json

CARRIED = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler",
    "gradient_clipping", "bf16", "bfloat16", "fp16", "zero_optimization", "dataloader_drop_last", "seed",
})  # fmt: skip
UNUSED = {
    "steps_per_print": "the run's own line shows each step",
    "wall_clock_breakdown": "`shoal profile SCRIPT.py` shows where the time goes",
    "dump_state": "run.toml in the run's folder has every key",
    "prescale_gradients": "gradients are sums divided by the samples of the step",
    "gradient_predivide_factor": "gradients are sums divided by the samples of the step",
    "communication_data_type": "gradients travel in the type of the parameters; codec.kind changes it",
    "seq_parallel_communication_data_type": "gradients travel in the type of the parameters",
    "data_types": "gradients are added up in the type of the parameters",
    "zero_allow_untested_optimizer": "what cannot be divided is refused by name",
    "zero_force_ds_cpu_optimizer": "the optimizer is the script's",
    "activation_checkpointing": "torch.utils.checkpoint and memory.recompute need no keys",
    "comms_logger": "the report counts every byte",
    "flops_profiler": "`shoal profile SCRIPT.py` counts them",
    "tensorboard": "set observe.tensorboard",
    "wandb": "set observe.wandb",
    "csv_monitor": "events/ in the run's folder has every measurement",
    "monitor_config": "the run's folder has every measurement",
    "disable_allgather": "ranks exchange what the layout needs",
    "checkpoint": "checkpoints are the run's own",
    "memory_breakdown": "the report has the memory of every rank",
}
REFUSED = {
    "amp": "set bf16 or fp16",
    "torch_autocast": "set bf16, or precision.kind",
    "sparse_gradients": "gradients must be dense: build embeddings with sparse=False",
    "curriculum_learning": "order the data set itself",
    "data_efficiency": "order the data set itself",
    "progressive_layer_drop": "drop layers in the model itself",
    "eigenvalue": "there is none in a run",
    "quantize_training": "sparsity rounds weights under `shoal train`",
    "compression_training": "[sparsity] prunes and rounds under `shoal train`",
    "elasticity": "[elastic] takes its place under `shoal train`; here the ranks may change between two starts",
    "autotuning": "`shoal plan` finds the layout",
    "pipeline": "layout.pipeline is for `shoal train`",
    "tensor_parallel": "set layout.tensor, for models with a tensor plan",
    "sequence_parallel_size": "layout.context is for `shoal train`",
    "hybrid_engine": "generate between two steps, within engine.full_parameters()",
    "nebula": "checkpoint.remote keeps copies elsewhere",
    "aio": "parameters and optimizer of a loop of one's own stay on the device; memory.offload is for `shoal train`",
    "compile": "call torch.compile(model) before initialize()",
}
ZERO_CARRIED = frozenset({"stage"})
ZERO_REFUSED = {
    "offload_param": "a loop of one's own keeps parameters on the device; memory.offload is for `shoal train`",
    "offload_optimizer": "a loop of one's own keeps the optimizer on the device; memory.offload is for `shoal train`",
    "cpu_offload": "a loop of one's own keeps the optimizer on the device; memory.offload is for `shoal train`",
    "zero_hpz_partition_size": "set layout.shard to the ranks of a host, and the others replicate",
    "zero_quantized_weights": "weights are gathered as they are",
    "zero_quantized_gradients": "set codec.kind",
    "mics_shard_size": "set layout.shard, and the other ranks replicate",
    "zenflow": "the update of a step is whole before the next begins",
}
ZERO_UNUSED = frozenset({
    "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint",
    "sub_group_size", "prefetch_bucket_size", "stage3_prefetch_bucket_size", "param_persistence_threshold",
    "stage3_param_persistence_threshold", "model_persistence_threshold", "stage3_model_persistence_threshold",
    "max_live_parameters", "stage3_max_live_parameters", "max_reuse_distance", "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters",
    "legacy_stage1", "round_robin_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint",
    "override_module_apply", "log_trace_cache_warnings", "use_all_reduce_for_fetch_params",
})  # fmt: skip
"""Sizes and switches of how DeepSpeed exchanges what it divides."""
LARGEST = 1 << 20
"""Bytes of a file of keys."""


@dataclass(frozen=True)
class Settings:
    """The keys that a run carries. `notes`: sentences on those that have no effect."""

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None
    zero: int = 0
    clip_norm: float = 0.0
    precision: str | None = None
    seed: int | None = None
    drop_last: bool = False
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Batches:
    """The samples of a step over all ranks, those of a microbatch on each, and how many of these make a step."""

    step: int
    micro: int
    accumulation: int
    notes: list[str] = field(default_factory=list)


def settings_of(config: Mapping[str, Any] | str | Path | None) -> Settings:
    """What a JSON file, or the dictionary of one, says. Raises `UsageError` for the first key that is not carried."""
    if config is None:
        raise UsageError(
            'initialize() needs config=, a dictionary or a JSON file, such as {"train_batch_size": 32}; or '
            "--deepspeed_config FILE"
        )
    given = dict(config) if isinstance(config, Mapping) else _read(Path(config))
    notes = []
    for name, value in given.items():
        if name in REFUSED and value not in (None, False) and not _disabled(value):
            raise UsageError(f"{name}: {REFUSED[name]}")
        if name in UNUSED:
            notes.append(f"{name} has no effect: {UNUSED[name]}")
        elif name not in CARRIED and name not in REFUSED:
            raise UsageError(f"DeepSpeed has no key {name!r}{near(name, [*CARRIED, *UNUSED, *REFUSED])}")
    clip = given.get("gradient_clipping") or 0.0
    if isinstance(clip, bool) or not isinstance(clip, int | float) or clip < 0:
        raise UsageError(f"gradient_clipping: found {clip!r}; it is the largest norm of the gradient, a number")
    return Settings(
        train=_samples(given, "train_batch_size"),
        micro=_samples(given, "train_micro_batch_size_per_gpu"),
        accumulation=_samples(given, "gradient_accumulation_steps"),
        zero=_stage(given.get("zero_optimization")),
        clip_norm=float(clip),
        precision=_precision(given),
        seed=given.get("seed"),
        drop_last=bool(given.get("dataloader_drop_last", False)),
        optimizer=given.get("optimizer"),
        scheduler=given.get("scheduler"),
        notes=tuple(notes),
    )


def batches_of(settings: Settings, *, ranks: int, loader: int | None) -> Batches:
    """The division of a step among so many ranks; `loader`: the batch size of a DataLoader that was handed over, which
    is that of a microbatch. Raises `UsageError` where the numbers do not go together.
    """
    train, micro, accumulation = settings.train, settings.micro or loader, settings.accumulation
    if loader is not None and settings.micro not in (None, loader):
        raise UsageError(
            f"the DataLoader has a batch_size of {loader}, and train_micro_batch_size_per_gpu is {settings.micro}"
        )
    if train is None:
        if micro is None:
            raise UsageError("train_batch_size or train_micro_batch_size_per_gpu is missing")
        accumulation = accumulation or 1
        total = micro * accumulation * ranks
        note = (
            f"a step has {total} samples: {micro} of a microbatch x {accumulation} x {ranks} ranks; with "
            f"train_batch_size = {total} it has so many on any number of ranks"
        )
        return Batches(total, micro, accumulation, [note])
    if micro is None:
        micro, over = divmod(train, ranks * (accumulation or 1))
        if over or not micro:
            raise UsageError(
                f"train_batch_size = {train} is no multiple of {ranks} ranks x gradient_accumulation_steps = "
                f"{accumulation or 1}"
            )
    found, over = divmod(train, micro * ranks)
    if over or not found:
        raise UsageError(
            f"train_batch_size = {train} is no multiple of train_micro_batch_size_per_gpu = {micro} x {ranks} ranks"
        )
    notes = []
    if accumulation not in (None, found):
        notes.append(
            f"gradient_accumulation_steps is {found} on {ranks} ranks, not {accumulation}: train_batch_size and "
            "train_micro_batch_size_per_gpu count"
        )
    return Batches(train, micro, found, notes)


def near(name: object, known: Iterable[str]) -> str:
    """ ", did you mean 'x'?" for the nearest of the `known`; nothing where none is near."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f", did you mean {found[0]!r}?" if found else ""


def _read(file: Path) -> dict[str, Any]:
    return read_json(file, dict, limit_bytes=LARGEST, error=UsageError, repair="give DeepSpeed's JSON file of keys")


def _disabled(table: Any) -> bool:
    return isinstance(table, Mapping) and table.get("enabled") is False


def _samples(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fills = ": only transformers' Trainer fills it in" if value == "auto" else ""
        raise UsageError(f"{name}: found {json.dumps(value)}; it is a whole number above 0{fills}")
    return value


def _stage(table: Any) -> int:
    """The stage of ZeRO; 0: nothing is divided."""
    given = dict(table or {})
    for name, value in given.items():
        if name in ZERO_REFUSED and value and not (isinstance(value, Mapping) and value.get("device") == "none"):
            raise UsageError(f"zero_optimization.{name}: {ZERO_REFUSED[name]}")
        if name not in ZERO_CARRIED and name not in ZERO_REFUSED and name not in ZERO_UNUSED:
            known = [*ZERO_CARRIED, *ZERO_UNUSED, *ZERO_REFUSED]
            raise UsageError(f"zero_optimization: DeepSpeed has no key {name!r}{near(name, known)}")
    stage = given.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UsageError(f"zero_optimization.stage: found {stage!r}; it is 0, 1, 2 or 3")
    return stage


def _precision(given: Mapping[str, Any]) -> str | None:
    """The kind of `[precision]`; None: that of the parameters."""
    kinds = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}
    found = [kind for name, kind in kinds.items() if (given.get(name) or {}).get("enabled")]
    if len(set(found)) > 1:
        raise UsageError("bf16 and fp16 are both enabled: leave one out")
    return found[0] if found else None
