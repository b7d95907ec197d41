"""`TrainingArguments` of a run of Shoal, and what becomes of each of its fields.

transformers' own class connects the ranks of a launcher and takes a GPU as soon as it is built. This one leaves both to
`shoal.start`. A field is carried over, or said to be of no use (it changes nothing that is computed), or refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import PartialState
from transformers.training_args import OptimizerNames

from shoal.errors import UsageError
from shoal.launcher.environment import ALONE, place_from
from shoal.own_loop.other_libraries import below, keys_of, refusing, said_by, without_launcher


class Whereabouts(NamedTuple):
    """Which rank of how many this process is, and where it computes."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


def _before_the_run() -> Whereabouts:
    """As long as the model is on the host, and ranks are not connected."""
    place = place_from(os.environ) or ALONE
    return Whereabouts(place.rank, place.local_rank, 1, torch.device("cpu"))


class OfRun:
    """Mixed into a class of arguments: the ranks and the device are those of the run."""

    disable_tqdm: bool | None
    deepspeed: Any

    def __post_init__(self) -> None:
        if self.deepspeed:  # transformers would let it take hold of every model that is loaded from now on
            with refusing():
                raise _refusal_of("deepspeed", self.deepspeed)
        self.whereabouts, self._n_gpu = _before_the_run(), 1
        with without_launcher():  # whoever asks accelerate for the ranks from now on hears that there is one
            self.distributed_state = PartialState(cpu=True)
        if self.disable_tqdm is None:
            self.disable_tqdm = True  # progress is shown by the run's own line
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _setup_devices(self) -> torch.device:
        return self.whereabouts.device

    @property
    def world_size(self) -> int:
        """Ranks of the run; 1 until it is started."""
        return self.whereabouts.world_size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.whereabouts.rank

    @property
    def local_process_index(self) -> int:
        """Its number on this host."""
        return self.whereabouts.local_rank

    @property
    def place_model_on_device(self) -> bool:
        """The run does it."""
        return False


class TrainingArguments(OfRun, transformers.TrainingArguments):  # pyright: ignore[reportIncompatibleVariableOverride]
    """See above, and `transformers.TrainingArguments`."""


class Seq2SeqTrainingArguments(OfRun, transformers.Seq2SeqTrainingArguments):  # pyright: ignore[reportIncompatibleVariableOverride]
    """See above, and `transformers.Seq2SeqTrainingArguments`."""


_CARRIED = """
    output_dir run_name per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor bf16 fp16 tf32 use_cache
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
    logging_strategy logging_steps logging_first_step logging_dir log_level log_level_replica disable_tqdm report_to
    project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size prediction_loss_only
    eval_accumulation_steps save_strategy save_steps save_total_limit load_best_model_at_end metric_for_best_model
    greater_is_better restore_callback_states_from_checkpoint seed full_determinism use_cpu dataloader_drop_last
    remove_unused_columns label_names train_sampling_strategy do_train do_eval do_predict local_rank
    resume_from_checkpoint torch_compile torch_compile_backend torch_compile_mode include_num_input_tokens_seen
    include_for_metrics
"""
CARRIED = frozenset(re.findall(r"\w+", _CARRIED))
"""Fields that mean what they mean to transformers, as far as docs/migration/hf-trainer.md does not say otherwise."""

_READING = "samples are read ahead as data.readers and data.reader_kind say"
_CONNECTED = "shoal.start connects the ranks"
UNUSED = {
    "dataloader_num_workers": _READING,
    "dataloader_prefetch_factor": _READING,
    "dataloader_persistent_workers": _READING,
    "dataloader_multiprocessing_context": _READING,
    "dataloader_pin_memory": _READING,
    "dataloader_in_order": _READING,
    "ddp_find_unused_parameters": "a parameter without a gradient is left alone, whatever is said",
    "ddp_bucket_cap_mb": "gradients.bucket_bytes says how gradients are packed",
    "ddp_broadcast_buffers": "ranks agree on buffers in every step",
    "ddp_static_graph": "each step's graph is looked at",
    "ddp_backend": _CONNECTED,
    "ddp_timeout": "wire.timeout_s says how long a rank is waited for",
    "accelerator_config": _CONNECTED,
    "log_on_each_node": "rank 0 logs",
    "logging_nan_inf_filter": "a step that is not finite is taken back and not logged",
    "save_on_each_node": "checkpoints and models are written once, by all ranks or by rank 0",
    "torch_empty_cache_steps": "memory is the run's",
    "enable_jit_checkpoint": "SIGTERM always ends in a checkpoint",
    "skip_memory_metrics": "memory/peak_bytes is measured in every step",
}
"""Fields that change nothing that is computed, and what does their work: a note says so."""

_ONE_BATCH = "the batch does not depend on memory here; batch.micro_samples says how much of it is computed at once"
_OF_ALL = "predictions are those of the whole evaluation set, put together"
_RESUMES = "a checkpoint is all that a resume needs, and the same command resumes without using a sample twice"
REFUSED = {
    "fsdp": "use layout.shard and memory.zero",
    "fsdp_config": "use layout.shard and memory.zero",
    "deepspeed": "use layout.shard and memory.zero",
    "parallelism_config": "use layout.shard and memory.zero",
    "auto_find_batch_size": _ONE_BATCH,
    "average_tokens_across_devices": "the loss is always the mean over all tokens of the global batch; leave it out",
    "data_seed": "the order of samples follows from the seed: set seed, or run.seed",
    "neftune_noise_alpha": "add the noise in the model's embedding, where it is keyed on the sample",
    "use_liger_kernel": "apply the kernels to the model before the Trainer is made",
    "liger_kernel_config": "apply the kernels to the model before the Trainer is made",
    "ignore_data_skip": _RESUMES,
    "save_only_model": f"{_RESUMES}; trainer.save_model(folder) writes a model alone",
    "length_column_name": "name the column length, or set data.group_by_length to a function that returns the lengths",
    "optim_target_modules": "pass optimizers=(optimizer, scheduler)",
    "batch_eval_metrics": f"{_OF_ALL}; leave it out",
    "eval_do_concat_batches": f"{_OF_ALL}; leave it out",
    "eval_use_gather_object": "predictions are tensors; leave it out",
    "bf16_full_eval": "evaluate what was trained; bf16=True computes in bfloat16",
    "fp16_full_eval": "evaluate what was trained; fp16=True computes in float16",
    "push_to_hub": "call trainer.save_model(folder), and upload the folder",
    "debug": "precision and values that are not finite are watched by the run itself; leave it out",
}
"""Fields that are refused where they are set, and what to do instead."""
OVERRIDDEN = {
    "get_train_dataloader": "pass train_dataset and data_collator; Shoal makes the batches",
    "get_eval_dataloader": "pass eval_dataset and data_collator; Shoal makes the batches",
    "get_test_dataloader": "pass the data set to predict(), and data_collator; Shoal makes the batches",
    "get_batch_samples": "pass train_dataset and data_collator; Shoal makes the batches",
    "_get_train_sampler": 'train_sampling_strategy="sequential" keeps the order of the data set; data.weights draws',
    "_inner_training_loop": "pass a callback, or write the loop with shoal.start",
    "_maybe_log_save_evaluate": "pass a callback",
    "autocast_smart_context_manager": "set precision.kind",
    "hyperparameter_search": "shoal sweep mine.py does it",
    "push_to_hub": "call save_model(folder), and upload the folder",
}
"""Methods that a subclass may not override, and what to do instead."""
UNCALLED = {"_save_checkpoint": "a callback's on_save is called behind each checkpoint"}
"""Methods that a subclass may override without effect, and what has one: a note says so."""
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
ORDERS = {"random": True, "sequential": False, "group_by_length": True}
"""By `train_sampling_strategy`: whether each epoch has an order of its own."""


def require_carried(arguments: Any) -> None:
    """Raises `UsageError` for arguments that are transformers' own, and for the first that a run cannot carry out."""
    if not isinstance(arguments, OfRun):
        name = type(arguments).__name__
        known = type(arguments) in (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments)
        raise UsageError(
            f"args is a {name} of transformers, which connects the ranks and takes a GPU itself: write "
            + (f"from shoal.huggingface import {name}" if known else f"shoal.huggingface.on_shoal({name})")
        )
    for name in _set_fields(arguments):
        if name not in CARRIED and name not in UNUSED:
            raise _refusal_of(name, getattr(arguments, name))
    if getattr(arguments, "sync_ref_model", False):  # of TRL
        raise UsageError(
            f"{type(arguments).__name__}.sync_ref_model = True: no checkpoint holds the reference model that this "
            "changes; leave it out"
        )
    optimizer = OptimizerNames(arguments.optim).value  # pyright: ignore[reportAttributeAccessIssue]
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"TrainingArguments.optim = {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}, or pass "
            "optimizers=(optimizer, scheduler)"
        )
    order = getattr(arguments, "train_sampling_strategy", "random")
    if order not in ORDERS:
        raise UsageError(f"TrainingArguments.train_sampling_strategy = {order!r}: choose one of {', '.join(ORDERS)}")


def _refusal_of(name: str, value: Any) -> UsageError:
    why = REFUSED.get(name, "Shoal's Trainer does not carry it out; leave it out")
    return UsageError(f"TrainingArguments.{name} = {value!r}: {why}")


def require_methods(kind: type, ours: type) -> None:
    """Raises `UsageError` for a subclass of `ours` that overrides what the loop of `train` does not call."""
    for name, instead in OVERRIDDEN.items():
        if _differs(name, kind, ours):
            raise UsageError(f"{kind.__name__}.{name} would not be called: {instead}")


def doubtful(kind: type, ours: type) -> list[str]:
    """A sentence for each method of a subclass of `ours` that has no effect, or not the one that it may be meant to."""
    overridden = {name for name in (*UNCALLED, "compute_loss", "loss_weight") if _differs(name, kind, ours)}
    said = [f"{kind.__name__}.{name} is not called: {UNCALLED[name]}" for name in UNCALLED if name in overridden]
    if "compute_loss" in overridden and "loss_weight" not in overridden:
        said.append(
            f"{kind.__name__}.compute_loss is taken for a mean over the labels that are not -100, or, without labels, "
            "over samples; where it is another one, as with weights of classes, override loss_weight too"
        )
    return said


def _differs(name: str, kind: type, ours: type) -> bool:
    return getattr(kind, name, None) is not getattr(ours, name, None)


def require_own_checkpoint(folder: str | os.PathLike[str] | bool | None, output_dir: str) -> None:
    """Raises `UsageError` for a checkpoint that is not of the run in `output_dir`, from which it resumes anyway."""
    own = Path(output_dir).resolve()
    if isinstance(folder, str | os.PathLike) and not Path(folder).resolve().is_relative_to(own):
        raise UsageError(
            f"resume_from_checkpoint = {os.fspath(folder)!r}: a run resumes from the newest checkpoint in its own "
            f"output_dir, {output_dir!r}: set output_dir, or, to begin with weights of transformers', load the model "
            "from that folder"
        )


def unused(arguments: OfRun) -> list[str]:
    """A sentence for each field that is set and has no meaning here."""
    return [
        f"TrainingArguments.{name} is not used: {UNUSED[name]}" for name in _set_fields(arguments) if name in UNUSED
    ]


def tables_of(arguments: Any) -> dict[str, dict[str, Any]]:
    """The tables of the run file that the arguments stand for. Checkpoints are saved when the Trainer asks for it."""
    kind = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else None
    kept = arguments.save_total_limit
    grouped = getattr(arguments, "train_sampling_strategy", "random") == "group_by_length"
    return {
        "run": {
            "directory": os.path.join(arguments.output_dir, "shoal"),
            "seed": arguments.seed,
            **({"device": "cpu"} if arguments.use_cpu else {}),
        },
        "checkpoint": {"every_steps": 0, **({"keep": kept} if kept else {})},
        **({"precision": {"kind": kind}} if kind else {}),
        **({"data": {"group_by_length": "shoal.huggingface.labels:lengths"}} if grouped else {}),
    }


class Plan(NamedTuple):
    """What a run is started with: its tables and the keys on top, the samples of a global batch, and its length."""

    tables: dict[str, Any]
    overrides: list[str]
    batch: int
    steps: int
    steps_per_epoch: int


def plan_of(
    arguments: Any,
    config: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | None,
    *,
    samples: int | None,
) -> Plan:
    """What the arguments stand for, below a run file or its tables, below keys (None: those of the command line), for a
    data set of so many samples; None: an iterable. Raises `UsageError` where nobody knows how long the run is.
    """
    tables, keys = below(config, tables_of(arguments)), keys_of(overrides)
    said = said_by(tables, keys)
    micro = arguments.per_device_train_batch_size
    batch = said.get("batch", {}).get("global_samples") or micro * arguments.gradient_accumulation_steps
    tables["batch"] = {"micro_samples": min(micro, batch), **tables.get("batch", {})}
    steps = said["run"].get("steps") or (arguments.max_steps if arguments.max_steps > 0 else None)
    if samples is None:
        if steps is None:
            raise UsageError("the train_dataset is an iterable, which has no epochs: set max_steps")
        return Plan(tables, keys, batch, steps, steps)
    per_epoch = max(1, samples // batch if arguments.dataloader_drop_last else ceil(samples / batch))
    return Plan(tables, keys, batch, steps or ceil(arguments.num_train_epochs * per_epoch), per_epoch)


def _set_fields(arguments: Any) -> Iterator[str]:
    """Fields of transformers' that differ from their defaults."""
    own = transformers.TrainingArguments
    default = TrainingArguments(output_dir=arguments.output_dir, use_cpu=arguments.use_cpu)
    for field in fields(own):
        if getattr(arguments, field.name) != getattr(default, field.name):
            yield field.name
