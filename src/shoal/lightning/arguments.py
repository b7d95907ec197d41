"""What becomes of each argument of Lightning's `Trainer`.

An argument is carried, or said to be of no use (it changes nothing that is computed), or refused with what to do
instead. `devices` x `num_nodes` is how many processes the script is written for: each of them takes `batch_size`
samples at once, so a batch has `batch_size` x `devices` x `num_nodes`, however many ranks there are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from shoal.errors import UsageError
from shoal.launcher.devices import gpus
from shoal.launcher.environment import place_from
from shoal.lightning.package import part
from shoal.observe.sink import OPEN_END
from shoal.own_loop.other_libraries import below, keys_of, ranks_of, said_by, seed_of_script

_CARRIED = """
    accelerator devices num_nodes strategy precision logger callbacks fast_dev_run max_epochs min_epochs max_steps
    min_steps max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches
    val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing
    enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm
    deterministic benchmark inference_mode profiler detect_anomaly barebones sync_batchnorm default_root_dir
    enable_autolog_hparams suggest_integrations
"""
CARRIED = frozenset(re.findall(r"\w+", _CARRIED))
"""Arguments that mean what they mean to Lightning, as far as docs/migration/lightning.md does not say otherwise."""
REFUSED = {
    "use_distributed_sampler": "the run divides the samples among the ranks, each once; leave it out",
    "plugins": "precision.kind says the precision, the run connects the ranks and writes checkpoints; leave it out",
    "reload_dataloaders_every_n_epochs": "the data set is handed over once; let d[i] return what the epoch needs",
    "model_registry": "a run goes on from its own checkpoints; leave it out",
}
"""Arguments that are refused where they are set, and what to do instead."""
NOT_CARRIED = "shoal.lightning.Trainer does not carry it out; leave it out"
CALLBACKS_REFUSED = {
    "StochasticWeightAveraging": "it takes steps of its own after the last one; take the callback WeightAveraging, or "
    "torch.optim.swa_utils.AveragedModel in hooks",
    "GradientAccumulationScheduler": "the global batch of a run is batch.global_samples, and stays; leave it out",
    "BatchSizeFinder": "shoal plan mine.py says which microbatch fits",
    "LearningRateFinder": "it trains several times over; set the rate, or look for it by shoal sweep mine.py",
    "ModelPruning": "masks are a table of the run file, [sparsity], of shoal.train",
    "BaseFinetuning": "a run never trains what is frozen when it begins; give the optimizer all parameters, freeze by "
    "requires_grad_(False) in on_train_start, and unfreeze in on_train_epoch_start",
    "OnExceptionCheckpoint": "a stop by a signal ends in a checkpoint, and the same command goes on; leave it out",
}
"""Callbacks, by the names of their classes, that are refused."""
PRECISIONS = {
    "32-true": None,
    "64-true": "float64",
    "16-mixed": "float16",
    "bf16-mixed": "bfloat16",
}
"""By `precision`: the `precision.kind`."""
_SHORT = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_REPLICATED = ("auto", "single_device", "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
_ZERO = {"fsdp": 3, "deepspeed": 2, "deepspeed_stage_1": 1, "deepspeed_stage_2": 2, "deepspeed_stage_3": 3}
"""By `strategy`: the `memory.zero` of a model that all ranks divide. DeepSpeed's own default is stage 2."""


@dataclass(frozen=True)
class Settings:
    """The arguments that a run carries. `processes` are those that the script is written for; `zero` is None where each
    rank has the whole model.
    """

    processes: int
    cpu: bool
    precision: str
    zero: int | None
    synchronised: bool
    root: str | None
    notes: Sequence[str]


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """What the `arguments` of a `Trainer` mean. Raises `UsageError` for the first that is not carried, and `TypeError`
    for one that Lightning does not have.
    """
    given = _set_of(arguments)
    for name, value in given.items():
        if name not in CARRIED:
            raise UsageError(f"Trainer({name}={value!r}): {REFUSED.get(name, NOT_CARRIED)}")
    for each in callbacks_of(given.get("callbacks")):
        require_callback(each)
    cpu = _on_cpu(given.get("accelerator", "auto"))
    precision = str(given.get("precision", "32-true"))
    precision = _SHORT.get(precision, precision)
    if precision not in PRECISIONS:
        raise UsageError(
            f"Trainer(precision={precision!r}): it is one of {', '.join(PRECISIONS)}; others are a "
            'precision.kind, such as "bfloat16_params" for bf16-true'
        )
    zero, notes = _division(given.get("strategy", "auto"))
    root = given.get("default_root_dir")
    return Settings(
        processes=_devices(given.get("devices", "auto"), cpu=cpu) * given.get("num_nodes", 1),
        cpu=cpu,
        precision=precision,
        zero=zero,
        synchronised=given.get("sync_batchnorm", False),
        root=None if root is None else os.fspath(root),
        notes=notes,
    )


def callbacks_of(given: Any) -> list[Any]:
    """The callbacks in the forms that the argument and `configure_callbacks` take."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def has_progress_bar(callbacks: Any) -> bool:
    """Whether one is among them: without it the run has a line of its own."""
    return any(isinstance(each, part("callbacks").ProgressBar) for each in callbacks_of(callbacks))


def require_callback(callback: Any) -> None:
    """Raises `UsageError` for one that is not carried out."""
    for kind in type(callback).__mro__:
        if kind.__name__ in CALLBACKS_REFUSED and kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
            raise UsageError(f"the callback {type(callback).__name__}: {CALLBACKS_REFUSED[kind.__name__]}")


def require_module(module: Any) -> None:
    """Raises `UsageError` for a LightningModule that a run does not train as Lightning does."""
    for each in callbacks_of(module.configure_callbacks()):
        require_callback(each)
    if "dataloader_iter" in signature(module.training_step).parameters:
        raise UsageError("training_step(dataloader_iter): a run gives one batch after the other; take batch")
    if module.automatic_optimization and part("utilities.model_helpers").is_overridden("backward", module):
        raise UsageError(
            f"{type(module).__name__}.backward would not be called: the run computes the gradient of the global batch; "
            "change it in on_after_backward or on_before_optimizer_step"
        )


def require_optimizers(optimizers: Sequence[Any]) -> None:
    """Raises `UsageError` for those of `configure_optimizers` that a run cannot step."""
    if not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise UsageError("configure_optimizers() returned no optimizer of torch.optim, and there is nothing to train")
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise UsageError("torch.optim.LBFGS computes a batch several times over; take an optimizer with one gradient")


def _set_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that differ from their defaults."""
    defaults = {name: each.default for name, each in signature(part().Trainer).parameters.items()}
    if unknown := [name for name in arguments if name not in defaults]:
        raise TypeError(f"Trainer() got an unexpected keyword argument {unknown[0]!r}")
    return {n: v for n, v in arguments.items() if v is not None and v is not defaults[n] and v != defaults[n]}


def _on_cpu(accelerator: Any) -> bool:
    """Whether the run computes there. Raises `UsageError` for an accelerator that it does not know."""
    if accelerator in ("auto", "gpu", "cuda"):
        return False
    if accelerator == "cpu":
        return True
    raise UsageError(f"Trainer(accelerator={accelerator!r}): it is auto, cpu, gpu or cuda; others are a run.device")


def _devices(devices: Any, *, cpu: bool) -> int:
    """Processes of a host that the script is written for."""
    if devices in ("auto", -1, "-1"):
        return 1 if cpu else gpus(os.environ) or 1
    if isinstance(devices, str) and "," in devices:
        return len([each for each in devices.split(",") if each.strip()])
    if isinstance(devices, list | tuple):
        return len(devices)
    if isinstance(devices, int | str) and str(devices).isdecimal() and int(devices) > 0:
        return int(devices)
    raise UsageError(f"Trainer(devices={devices!r}): give their number, a list of them, or auto")


def _division(strategy: Any) -> tuple[int | None, list[str]]:
    """The stage of ZeRO that `strategy` stands for, and a note. Raises `UsageError` for one that is not carried."""
    if not isinstance(strategy, str):
        name = type(strategy).__name__
        if name != "DDPStrategy":
            raise UsageError(
                f"Trainer(strategy={name}(...)): layout.shard and memory.zero divide the model: set these keys, or "
                'give the name of a strategy, such as "fsdp" or "deepspeed_stage_3"'
            )
        return None, ["the arguments of DDPStrategy are not used: gradients are summed by the run"]
    name = strategy.lower()
    if name.startswith("ddp_") and name.endswith(("_find_unused_parameters_true", "_find_unused_parameters_false")):
        name = "ddp"
    if name in _REPLICATED:
        return None, []
    if name in _ZERO:
        return _ZERO[name], []
    instead = "memory.offload keeps state on the host" if "offload" in name else "set layout.* and memory.zero"
    raise UsageError(f"Trainer(strategy={strategy!r}): {instead}; carried are {', '.join([*_REPLICATED, *_ZERO])}")


@dataclass(frozen=True)
class Plan:
    """What a run is started with: its tables and the keys on top, the samples of a step, and the batches that it has
    for Lightning.
    """

    tables: dict[str, Any]
    keys: list[str]
    step_samples: int
    accumulation: int


def plan_of(
    settings: Settings,
    config: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | None,
    *,
    batch: int,
    accumulation: int,
    data: Any,
) -> Plan:
    """What the arguments stand for, below a run file or its tables, below keys (None: those of the command line), for
    batches of that many samples over all ranks and what is handed over as `data`. Raises `UsageError` for a batch that
    the ranks cannot share.
    """
    tables, keys = below(config, _tables(settings)), keys_of(overrides)
    said = said_by(tables, keys)
    step = said.get("batch", {}).get("global_samples", batch * accumulation)
    if step % batch:
        raise UsageError(
            f"batch.global_samples = {step} is no multiple of the {batch} samples that Lightning takes at once "
            "(batch_size x devices x num_nodes): change these, or the key"
        )
    asked = said.get("run", {}).get("processes") or said.get("layout")
    if place_from(os.environ) is None and not asked and settings.processes > 1:
        tables["run"] = {**tables.get("run", {}), "processes": settings.processes}
    ranks = ranks_of(tables, keys, file="shoal.lightning.Trainer", step=step, data=data)
    if batch % ranks:
        raise UsageError(
            f"{ranks} ranks cannot share the {batch} samples that Lightning takes at once (batch_size x devices x "
            "num_nodes): change these, or set run.processes"
        )
    tables["batch"] = {"micro_samples": batch // ranks, **tables.get("batch", {})}
    if settings.zero is not None and "layout" not in said and ranks > 1:
        tables["layout"] = {"shard": ranks}
        tables["memory"] = {"zero": settings.zero, **tables.get("memory", {})}
    return Plan(tables, keys, step, step // batch)


def _tables(settings: Settings) -> dict[str, dict[str, Any]]:
    """The tables of the run file that the arguments stand for."""
    directory = {} if settings.root is None else {"directory": os.path.join(settings.root, "shoal")}
    kind = PRECISIONS[settings.precision]
    return {
        "run": {**({"device": "cpu"} if settings.cpu else {}), **seed_of_script(), **directory},
        **({"precision": {"kind": kind}} if kind else {}),
        **({"model": {"batch_norm": "synchronised"}} if settings.synchronised else {}),
    }


def steps_of(*, batches: int, accumulation: int, max_epochs: int | None, max_steps: int, optimizers: int) -> int:
    """Steps of a run of so many `batches` an epoch. Lightning counts an update of each of several optimizers."""
    ends: list[int] = []
    if max_epochs is not None and max_epochs >= 0:
        ends.append(max_epochs * -(-batches // accumulation))
    if max_steps >= 0 and optimizers == 1:
        ends.append(max_steps)
    return max(1, min(ends)) if ends else OPEN_END
