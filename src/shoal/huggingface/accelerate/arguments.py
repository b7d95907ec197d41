"""What becomes of each argument of `Accelerator`, and of its methods that a run of Shoal does not have.

An argument is carried, or said to be of no use (it changes nothing that is computed), or refused with what to do
instead; so are the variables by which `accelerate launch` hands over the answers of `accelerate config`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import DistributedDataParallelKwargs, ProfileKwargs, ProjectConfiguration

from shoal.errors import UsageError
from shoal.observe.sink import OPEN_END
from shoal.own_loop.other_libraries import below, keys_of, ranks_of, said_by, seed_of_script

PRECISIONS = {"no": None, "fp16": "float16", "bf16": "bfloat16"}
"""By `mixed_precision`: the `precision.kind`."""

CARRIED = (
    *("mixed_precision", "gradient_accumulation_steps", "gradient_accumulation_plugin", "cpu"),
    *("dataloader_config", "log_with", "project_dir", "project_config", "step_scheduler_with_optimizer"),
    "kwargs_handlers",
)
"""Arguments that mean what they mean to accelerate, as far as docs/migration/accelerate.md does not say otherwise."""
_LAYOUT = "layout.shard and memory.zero divide the model: set these keys"
_DIVIDES = "every rank reads its own part of each batch; leave it out"
REFUSED = {
    "deepspeed_plugin": _LAYOUT,
    "deepspeed_plugins": _LAYOUT,
    "fsdp_plugin": _LAYOUT,
    "parallelism_config": f"{_LAYOUT}, or layout.tensor",
    "torch_tp_plugin": "set layout.tensor, for models with a tensor plan",
    "megatron_lm_plugin": "layout.replicate, layout.shard and layout.tensor divide a loop of your own; other axes need "
    "shoal.train",
    "dynamo_backend": "call model.compile() before prepare",
    "dynamo_plugin": "call model.compile() before prepare",
}
"""Arguments that are refused where they are set, and what to do instead."""
NOT_CARRIED = "a run does not carry it out; leave it out"
UNUSED = {
    "rng_types": "random numbers are keyed on the sample, and need not be brought into step",
    "device_placement": "the run puts models and batches on its device",
    "split_batches": "a batch is always divided among the ranks",
}
"""Arguments that change nothing that is computed, and what does their work: a note says so."""
LOADERS_REFUSED = {"dispatch_batches": _DIVIDES, "custom_classes": "hand over a DataLoader of PyTorch's"}
LOADERS_UNUSED = {
    "split_batches": "a batch is always divided among the ranks",
    "even_batches": "a rank without a sample computes a copy that counts for nothing",
    "use_seedable_sampler": "the order of samples follows from run.seed",
    "data_seed": "the order of samples follows from run.seed",
    "non_blocking": "samples are read ahead as data.readers and data.reader_kind say",
    "use_stateful_dataloader": "a checkpoint knows which samples were used",
}
"""Fields of a `DataLoaderConfiguration`."""
HANDLERS_UNUSED = {
    "DistributedDataParallelKwargs": "gradients are summed by the run; a parameter without one is left alone",
    "InitProcessGroupKwargs": "the run connects the ranks; wire.timeout_s says how long one is waited for",
}
HANDLERS_REFUSED = {
    "GradScalerKwargs": "set the keys of [precision]",
    "AutocastKwargs": "set precision.kind",
}
"""Objects among `kwargs_handlers`."""
VARIABLES_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": _LAYOUT,
    "ACCELERATE_USE_FSDP": _LAYOUT,
    "ACCELERATE_USE_MEGATRON_LM": REFUSED["megatron_lm_plugin"],
    "ACCELERATE_USE_PARALLELISM_CONFIG": _LAYOUT,
    "ACCELERATE_DYNAMO_BACKEND": REFUSED["dynamo_backend"],
}
"""Variables of `accelerate launch`."""
METHODS_REFUSED = {
    "lomo_backward": "its update is a part of the backward; use an optimizer that has a step()",
    "maybe_context_parallel": "layout.context needs shoal.train",
    "trigger_sync_in_backward": "the last microbatch of a step sums the gradient by itself; leave it out",
    "deepspeed_ulysses_dl_adapter": "layout.context needs shoal.train",
    **dict.fromkeys(
        [f"{axis}_rank" for axis in ("data_parallel", "data_parallel_shard", "tensor_parallel", "context_parallel")],
        "a rank of a loop of your own has a number, process_index",
    ),
    "pipeline_parallel_rank": "a loop of your own has no pipeline",
    "gradient_state": "ask sync_gradients, and the loop where an epoch ends",
}
"""Methods and attributes that a run does not have, and what to do instead."""
ANSWERS = {
    "is_fsdp2": False,
    "is_composable_parallelism_enabled": False,
    "deepspeed_plugin": None,
    "parallelism_config": None,
    "torch_device_mesh": None,
    "fp8_backend": None,
    "scaler": None,
    "split_batches": True,
    "even_batches": True,
    "dispatch_batches": False,
    "non_blocking": False,
    "use_seedable_sampler": True,
    "use_stateful_dataloader": True,
}
"""Attributes that are the same in every run. A script sees no scaled gradient, so it has no scaler."""
BACKWARD = ("weight", "reduction", "more", "optimizer")
"""Keywords of `backward`: those of `Training.backward`."""


@dataclass(frozen=True)
class Settings:
    """The arguments that a run carries. `accumulation` batches make a step; `precision` is a `precision.kind`."""

    accumulation: int
    mixed_precision: str
    cpu: bool
    steps_scheduler: bool
    project: ProjectConfiguration
    profile: ProfileKwargs | None
    notes: Sequence[str]

    @property
    def precision(self) -> str | None:
        return PRECISIONS[self.mixed_precision]


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """What the `arguments` of an `Accelerator` mean. Raises `UsageError` for the first that is not carried, and
    `TypeError` for one that accelerate does not have.
    """
    _check_variables(os.environ)
    given = _set_of(arguments)
    for name in given:
        if name not in CARRIED and name not in UNUSED:
            raise UsageError(f"Accelerator({name}=...): {REFUSED.get(name, NOT_CARRIED)}")
    notes = [f"{name} is not used: {UNUSED[name]}" for name in given if name in UNUSED]
    notes += _loaders(given["dataloader_config"]) if "dataloader_config" in given else []
    handlers = given.get("kwargs_handlers", ())
    profile = next((each for each in handlers if isinstance(each, ProfileKwargs)), None)
    notes += [_handler(each) for each in handlers if each is not profile]
    mixed = given.get("mixed_precision", os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    mixed = str(getattr(mixed, "value", mixed))
    if mixed not in PRECISIONS:
        raise UsageError(f"Accelerator(mixed_precision={mixed!r}): it is no, fp16 or bf16; others are a precision.kind")
    return Settings(
        accumulation=_accumulation(given),
        mixed_precision=mixed,
        cpu=given.get("cpu", False),
        steps_scheduler=given.get("step_scheduler_with_optimizer", True),
        project=_project(given),
        profile=profile,
        notes=notes,
    )


def _set_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that differ from their defaults."""
    defaults = {name: each.default for name, each in signature(accelerate.Accelerator).parameters.items()}
    if unknown := [name for name in arguments if name not in defaults]:
        raise TypeError(f"Accelerator() got an unexpected keyword argument {unknown[0]!r}")
    return {n: v for n, v in arguments.items() if v is not None and v is not defaults[n] and v != defaults[n]}


def _check_variables(environ: Mapping[str, str]) -> None:
    for name, instead in VARIABLES_REFUSED.items():
        if environ.get(name, "false").lower() not in ("false", "0", "no", ""):
            raise UsageError(f"accelerate launch has set {name}={environ[name]}: {instead}")


def _accumulation(given: Mapping[str, Any]) -> int:
    """Batches of a step. Raises `UsageError` for a plugin that has a step end elsewhere."""
    plugin, steps = given.get("gradient_accumulation_plugin"), given.get("gradient_accumulation_steps", 1)
    if plugin is None:
        return int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") or steps)
    if steps not in (1, plugin.num_steps):
        raise UsageError("gradient_accumulation_steps and gradient_accumulation_plugin say different numbers")
    if not plugin.sync_with_dataloader:
        raise UsageError(
            "GradientAccumulationPlugin(sync_with_dataloader=False): a step of a loop over epochs ends with them; "
            "leave it out"
        )
    return plugin.num_steps


def _project(given: Mapping[str, Any]) -> ProjectConfiguration:
    project, folder = given.get("project_config", ProjectConfiguration()), given.get("project_dir")
    if folder is not None and project.project_dir is None:
        project.set_directories(os.fspath(folder))
    return project


def _loaders(config: Any) -> list[str]:
    """A sentence for each field that is set and has no meaning. Raises `UsageError` for one that is not carried."""
    default, notes = type(config)(), list[str]()
    for each in fields(config):
        if getattr(config, each.name) == getattr(default, each.name):
            continue
        if each.name not in LOADERS_UNUSED:
            why = LOADERS_REFUSED.get(each.name, NOT_CARRIED)
            raise UsageError(f"DataLoaderConfiguration.{each.name}: {why}")
        notes.append(f"DataLoaderConfiguration.{each.name} is not used: {LOADERS_UNUSED[each.name]}")
    return notes


def _handler(handler: Any) -> str:
    name = type(handler).__name__
    if name not in HANDLERS_UNUSED:
        raise UsageError(f"{name} among kwargs_handlers: {HANDLERS_REFUSED.get(name, NOT_CARRIED)}")
    if isinstance(handler, DistributedDataParallelKwargs) and str(handler.comm_hook) != "no":
        raise UsageError(
            f"DistributedDataParallelKwargs(comm_hook={str(handler.comm_hook)!r}): a codec is a key of the run: set "
            'codec.kind = "cast" with codec.dtype, or codec.kind = "power_sgd"'
        )
    return f"{name} is not used: {HANDLERS_UNUSED[name]}"


@dataclass(frozen=True)
class Plan:
    """What a run is started with: its tables and the keys on top, and the samples of a step and of a whole batch.
    `in_step`: ranks make every step together.
    """

    tables: dict[str, Any]
    keys: list[str]
    step_samples: int
    batch_samples: int
    steps: int
    in_step: bool


def plan_of(
    settings: Settings,
    config: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | None,
    *,
    batch: int,
    data: Any,
    endless: bool,
) -> Plan:
    """What the arguments stand for, below a run file or its tables, below keys (None: those of the command line), for
    a DataLoader with that batch size and what is handed over as `data`. Raises `UsageError` for a batch that the ranks
    cannot share, and where nobody knows how long the run is.
    """
    tables, keys = below(config, _tables(settings)), keys_of(overrides)
    said = said_by(tables, keys)
    step, steps = batch * settings.accumulation, said.get("run", {}).get("steps")
    if (asked := said.get("batch", {}).get("global_samples", step)) != step:
        raise UsageError(
            f"batch.global_samples = {asked}, and the DataLoader's batch_size x gradient_accumulation_steps is {batch} "
            f"x {settings.accumulation}: set these two, from which the script counts its steps"
        )
    if endless and steps is None:
        raise UsageError("the DataLoader's data set is an iterable, which has no epochs: set run.steps")
    ranks = ranks_of(tables, keys, file="shoal.huggingface.Accelerator", step=step, data=data)
    if ranks > 1 and "accelerate.local_sgd" in sys.modules:
        raise UsageError(
            "accelerate.local_sgd.LocalSGD has each rank take steps of its own in a part of the training: leave it "
            'out, and set sync.kind = "local" and sync.period'
        )
    shares = max(1, ranks // (said.get("layout", {}).get("tensor") or 1))  # ranks of one group have the same samples
    if batch % shares:
        raise UsageError(
            f"the DataLoader has a batch_size of {batch}, which {shares} ranks cannot share: make it a multiple of "
            f"{shares} (a step has batch_size x gradient_accumulation_steps samples on any number of ranks), or set "
            "run.processes"
        )
    tables["batch"] = {"micro_samples": batch // shares, **tables.get("batch", {})}
    in_step = said.get("sync", {}).get("kind", "allreduce") == "allreduce"
    return Plan(tables, keys, step, batch, steps or OPEN_END, in_step)


def _tables(settings: Settings) -> dict[str, dict[str, Any]]:
    """The tables of the run file that the arguments stand for. Checkpoints are saved when the script asks for it."""
    run: dict[str, Any] = {**({"device": "cpu"} if settings.cpu else {}), **seed_of_script()}
    if settings.project.project_dir is not None:
        run["directory"] = os.path.join(settings.project.project_dir, "shoal")
    kind, kept = settings.precision, settings.project.total_limit
    return {
        "run": run,
        "checkpoint": {"every_steps": 0, **({"keep": kept} if kept else {})},
        **({"precision": {"kind": kind}} if kind else {}),
    }
