"""`initialize` and `Engine`: DeepSpeed's calls on the engine of `shoal.start`.

The model that is trained is that of one process of the script, on any number of ranks and under any stage of ZeRO: the
run divides the samples of a step, `train_batch_size`, among the ranks, uses each sample of an epoch once, saves, and
resumes by itself.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.deepspeed.config import Batches, Settings, batches_of, settings_of
from shoal.deepspeed.loader import Loader
from shoal.deepspeed.optimizers import optimizer_of
from shoal.deepspeed.ranks import let_go
from shoal.deepspeed.rates import schedule_of
from shoal.errors import UsageError, UserCodeError
from shoal.launcher.environment import ALONE, place_from
from shoal.launcher.own_script import script_check
from shoal.observe.sink import OPEN_END
from shoal.own_loop.loop import Training
from shoal.own_loop.objects import data_of_script
from shoal.own_loop.other_libraries import below, keys_of, ranks_of, refusing, said_by, seed_of_script

OTHERS = frozenset({"collate_fn", "config_params", "distributed_port", "dist_init_required"})
NOT_TAKEN = {"mpu": "leave it out, and set layout.tensor", "mesh_param": "leave it out, and set layout"}
"""Arguments of `initialize` that a run takes besides, and what to do instead of others."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset | DataLoader | None = None,
    lr_scheduler: Any = None,
    *,
    config: Mapping[str, Any] | str | Path | None = None,
    run: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] | None = None,
    **others: Any,
) -> tuple[Engine, torch.optim.Optimizer, Loader, Any]:
    """Starts the run, and returns (engine, optimizer, loader, scheduler), as DeepSpeed's.

    `training_data` is a data set, or a DataLoader, whose order, collate_fn and drop_last count, and whose batch_size is
    a microbatch. `config` is DeepSpeed's JSON file or its keys; None: that of `args.deepspeed_config`. `run` is a run
    file of Shoal's or its tables, and `overrides` are keys such as "layout.shard=2"; None: those of the command line.
    They win over `config`. Of the `others`, collate_fn and config_params mean what they mean in DeepSpeed,
    distributed_port and dist_init_required have no effect, and mpu is refused.

    A refusal is a sentence on standard error, and exit code 2.
    """
    with refusing():
        if model is None or training_data is None:
            raise UsageError(
                f"initialize() needs {'model=' if model is None else 'training_data='}: "
                + ("an nn.Module" if model is None else "a data set or a DataLoader, which the run divides among ranks")
            )
        if unknown := [name for name, value in others.items() if name not in OTHERS and value is not None]:
            raise UsageError(f"initialize({unknown[0]}=...): {NOT_TAKEN.get(unknown[0], 'leave it out')}")
        named = others.get("config_params") or getattr(args, "deepspeed_config", None)
        settings = settings_of(named if config is None else config)
        optimizer = _optimizer(settings, optimizer, model_parameters, model)
        scheduler = _scheduler(settings, lr_scheduler, optimizer)
        own = isinstance(training_data, DataLoader)
        loader = training_data if own else _loader_of(training_data, others.get("collate_fn"), settings)
        size = loader.batch_size if own else None
        tables, keys, batches = _planned(settings, run, overrides, data_of_script(loader)[0], loader=size)
    return _begun(model, optimizer, scheduler, loader, settings, batches, tables, keys)


def _loader_of(data: Any, collate_fn: Any, settings: Settings) -> DataLoader:
    """One that says the order; how many samples make a batch is the run's."""
    return DataLoader(data, 1, shuffle=True, collate_fn=collate_fn, drop_last=settings.drop_last)


def _optimizer(settings: Settings, given: Any, parameters: Any, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is not None:
        return given(trained)
    if settings.optimizer is None:
        raise UsageError("initialize() needs an optimizer: optimizer=..., or the JSON file's optimizer")
    return optimizer_of(settings.optimizer, trained)


def _scheduler(settings: Settings, given: Any, optimizer: torch.optim.Optimizer) -> Any:
    if given is not None:
        return given if hasattr(given, "step") else given(optimizer)
    return None if settings.scheduler is None else schedule_of(settings.scheduler, optimizer)


def _planned(
    settings: Settings,
    run: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | None,
    data: Any,
    *,
    loader: int | None,
) -> tuple[dict[str, Any], list[str], Batches]:
    """The tables and keys of the run, and how a step is divided."""
    precision = {"precision": {"kind": settings.precision}} if settings.precision else {}
    seed = {"seed": settings.seed} if settings.seed is not None else seed_of_script()
    tables = below(run, {"run": seed, "checkpoint": {"every_steps": 0}, **precision})
    keys = keys_of(overrides)
    said = said_by(tables, keys)
    step = said.get("batch", {}).get("global_samples") or settings.train or settings.micro or loader or 1
    ranks = ranks_of(tables, keys, file="shoal.deepspeed.initialize", step=step, data=data)
    layout = said.get("layout", {})
    batches = batches_of(settings, ranks=max(1, ranks // layout.get("tensor", 1)), loader=loader)
    if (asked := said.get("batch", {}).get("global_samples", batches.step)) != batches.step:
        raise UsageError(f"batch.global_samples = {asked}, and the JSON file says {batches.step}: set train_batch_size")
    tables["batch"] = {"micro_samples": batches.micro, **tables.get("batch", {})}
    if settings.zero and ranks > 1 and not layout.keys() & {"shard", "replicate"}:
        tables["layout"] = {**tables.get("layout", {}), "shard": max(1, ranks // layout.get("tensor", 1))}
    if settings.zero and ranks > 1:
        tables["memory"] = {"zero": settings.zero, **tables.get("memory", {})}
    return tables, keys, batches


def _begun(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    loader: DataLoader,
    settings: Settings,
    batches: Batches,
    tables: Mapping[str, Any],
    keys: Sequence[str],
) -> tuple[Engine, torch.optim.Optimizer, Loader, Any]:
    let_go()
    kept = _Kept()
    state: dict[str, Any] = {"engine": kept, **({} if scheduler is None else {"scheduler": scheduler})}
    run = shoal.start(
        tables,
        keys,
        model=model,
        optimizer=optimizer,
        data=loader,
        batch_samples=batches.step,
        steps=OPEN_END,
        state=state,
    )
    engine = Engine(run, model, optimizer, scheduler, settings=settings, batches=batches, kept=kept)
    for sentence in [*batches.notes, *settings.notes]:
        run.note(sentence)
    if run.steps_done:
        run.note(f"the run goes on behind step {run.steps_done}: engine.global_steps says where the loop is")
    atexit.register(engine.close_at_exit)
    samples = len(loader.sampler) if hasattr(loader.sampler, "__len__") else None  # pyright: ignore[reportArgumentType]
    if samples is not None and loader.drop_last:
        samples -= samples % batches.step
    engine.batches = Loader(engine, samples=samples, step=batches.step, accumulation=batches.accumulation)
    return engine, optimizer, engine.batches, scheduler


class _Kept:
    """What a checkpoint holds of an engine: `tag` and `client` are those of the newest `save_checkpoint`."""

    def __init__(self) -> None:
        self.over, self.tag, self.client, self.skipped = False, "", dict[str, Any](), 0

    def state_dict(self) -> dict[str, Any]:
        return {"over": self.over, "tag": self.tag, "client": self.client, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.over, self.tag, self.client, self.skipped = (state[n] for n in ("over", "tag", "client", "skipped"))


class Engine(nn.Module):
    """DeepSpeed's engine on a run; `initialize` makes it. `module` is the script's model, the same object."""

    def __init__(
        self,
        run: Training,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        settings: Settings,
        batches: Batches,
        kept: _Kept,
    ) -> None:
        super().__init__()
        self.module = model
        self.batches: Loader | None = None
        self.run, self.optimizer, self.lr_scheduler = run, optimizer, scheduler
        self.micro_steps, self._norm = 0, None
        self._settings, self._batches, self._kept = settings, batches, kept

    @property
    def is_over(self) -> bool:
        """Whether the script had come to its end when the run was saved."""
        return self._kept.over

    @property
    def device(self) -> torch.device:
        """Where this rank computes; batches arrive there."""
        return self.run.device

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self.run.rank

    @property
    def local_rank(self) -> int:
        """Its number on this host."""
        return (place_from(os.environ) or ALONE).local_rank

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return self.run.world_size

    @property
    def global_steps(self) -> int:
        """Steps of the whole run, those before a resume and the one that has its update now included."""
        return self.run.steps_done + (self.run.update is not None)

    @property
    def global_samples(self) -> int:
        """Samples of these steps."""
        return self.global_steps * self._batches.step

    @property
    def skipped_steps(self) -> int:
        """Steps whose update was left out, as their gradient was not finite."""
        return self._kept.skipped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, computed in the type of the run; in float32."""
        with self.run.autocast():
            return tree_map(_in_float32, self.module(*args, **kwargs))

    def backward(self, loss: Tensor, **kwargs: Any) -> Tensor:
        """Accumulates the gradient of `loss`, a mean over the samples of the microbatch; `weight=n` where it is a mean
        over n tokens, of which microbatches have other numbers (see `Training.backward`). Returns the loss.
        """
        for name in ("allreduce_gradients", "release_loss", "retain_graph", "scale_wrt_gas"):
            if kwargs.pop(name, None) not in (None, True, name in ("allreduce_gradients", "scale_wrt_gas")):
                raise UserCodeError(f"engine.backward({name}=...): leave it out")
        self.run.backward(loss, **kwargs)
        return loss

    def step(self, lr_kwargs: None = None) -> None:
        """After each microbatch: behind the last of a step clips, updates, and moves the schedule."""
        run = self.run
        norm = run.clip_grad_norm_(self._settings.clip_norm) if self._settings.clip_norm else None
        self.optimizer.step()
        self.micro_steps += 1
        update = run.update
        if update is None:
            return
        self._norm = update.grad_norm if norm is None else norm
        self.optimizer.zero_grad()
        if not update:
            self._kept.skipped += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this microbatch is the last of its step."""
        return self.run.last_of_step

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing: the run knows with which microbatch a step ends."""
        return nullcontext()

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of the newest step's gradient, before it was clipped; None before the first update."""
        return self._norm

    def __getattr__(self, name: str) -> Any:
        """What the engine has not, the script's model has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or not hasattr(self.module, name):
                raise
            return getattr(self.module, name)

    def bfloat16_enabled(self) -> bool:
        """Whether the run computes in bfloat16."""
        return self._settings.precision == "bfloat16"

    def fp16_enabled(self) -> bool:
        """Whether the run computes in float16, by a loss scale."""
        return self._settings.precision == "float16"

    def get_lr(self) -> list[float]:
        """The rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self._batches.step

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a microbatch on each rank."""
        return self._batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Microbatches of a step on each rank."""
        return self._batches.accumulation

    def gradient_clipping(self) -> float:
        """The largest norm; 0: gradients are not clipped."""
        return self._settings.clip_norm

    def zero_optimization_stage(self) -> int:
        """The stage of the JSON file."""
        return self._settings.zero

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every rank has every parameter whole, which stage 3 otherwise divides. Every rank enters it."""
        return self.run.full_parameters()

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves the run behind this step, in its own folder, with `client_state`. Every rank calls it, behind an
        update. `save_dir` says nothing.
        """
        if script_check(os.environ) is not None:
            return True
        if self.run.update is None:
            raise UserCodeError(
                "save_checkpoint() was called in the middle of a step, of which a part would be lost: call it behind "
                "an update, where engine.is_gradient_accumulation_boundary() was true"
            )
        self._kept.tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._kept.client = dict(client_state or {})
        self.run.save()
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | int | None = None, **parts: Any
    ) -> tuple[str | None, dict[str, Any] | None]:
        """(where, client state) of the checkpoint from which the run has been resumed; (None, None) for a new run.

        A client state that has an epoch, by a key such as "epoch", is that of a loop that begins with it: the loader
        then begins with the open epoch, and else passes over those before it without a batch.

        A run is resumed as a whole when it begins, from its newest checkpoint. Raises `UserCodeError` where `tag` names
        another one, for a part of a checkpoint, and for a folder of DeepSpeed's own.
        """
        default = {"load_module_strict": True, "load_optimizer_states": True, "load_lr_scheduler_states": True}
        for name, value in parts.items():
            if value != default.get(name, False) and value is not None:
                raise UserCodeError(f"load_checkpoint({name}=...): a run is resumed as a whole; leave it out")
        if not self.run.steps_done:
            if (Path(load_dir) / "latest").is_file():
                raise UserCodeError(
                    f"{load_dir} is a checkpoint of DeepSpeed's: bring its weights together by zero_to_fp32.py, load "
                    "them into the model before initialize(), and leave load_checkpoint out"
                )
            return None, None
        if tag is not None and str(tag) != self._kept.tag:
            raise UserCodeError(
                f"load_checkpoint(tag={tag!r}): the run stands at step {self.run.steps_done}, saved as "
                f"{self._kept.tag or 'none'}, its newest checkpoint, and goes on there: leave the tag out"
            )
        if self.batches is not None and any("epoch" in name.lower() for name in self._kept.client):
            self.batches.begin_here()
        return str(Path(load_dir) / self._kept.tag), dict(self._kept.client)

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str = "model.safetensors") -> bool:
        """Writes the model's whole weights, in their own type, in safetensors' format. Every rank calls it."""
        file = (Path(save_dir) / save_filename).with_suffix(".safetensors")
        if script_check(os.environ) is None:
            file.parent.mkdir(parents=True, exist_ok=True)
        self.run.export(file)
        return True

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, whole, in memory of its own. Every rank calls it."""
        with self.full_parameters():
            state = self.module.state_dict(*args, **kwargs)
            return {name: value.detach().clone() for name, value in state.items()}

    def destroy(self) -> None:
        """Ends the run: it is finished, whatever step it has come to. So does the end of the script."""
        self._kept.over = True
        if self.batches is not None:
            self.batches.close()
        self.run.end()
        self.run.close()

    def close_at_exit(self) -> None:
        """The script comes to its end, unless by an error."""
        if getattr(sys, "last_value", None) is None:
            with suppress(SystemExit):  # of a comparison, which ends the process
                self.destroy()


def _in_float32(each: Any) -> Any:
    narrow = isinstance(each, Tensor) and each.dtype in (torch.bfloat16, torch.float16)
    return each.float() if narrow else each
