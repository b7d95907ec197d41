"""What a script hands over to `shoal.start`: data, models and optimizers, and what of them a run cannot take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from shoal.assembly.objects import UserObjects, may_be_data
from shoal.data.inputs import AsInputs, Collated
from shoal.data.iterable import IterableSource, as_source, held_out_items, training_loader
from shoal.data.sampling import as_sampled
from shoal.engine.config import BFloat16Params, Float8, Float16, Float64
from shoal.errors import ConfigError, UsageError, UserCodeError
from shoal.launcher.environment import place_from
from shoal.launcher.own_script import Reached, reads_for
from shoal.launcher.supervision import say
from shoal.models.roles import tables_in
from shoal.runfile.run_file import RunFile
from shoal.sync.config import ServerConfig


def check_alone() -> None:
    """Raises `UsageError` where the script has connected the ranks itself."""
    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            "the script has called torch.distributed.init_process_group before shoal.start, which connects the ranks "
            "itself: remove that call, and destroy_process_group"
        )


def objects_of(given: Mapping[str, Any], data: Any) -> UserObjects:
    """What the script handed over: several models as one module, whose parameters are called "0.weight", ...

    Raises `UserCodeError` for a model that another library has divided already.
    """
    model, optimizer = given["model"], given["optimizer"]
    several = isinstance(model, list | tuple)
    whole = nn.ModuleList(_module(each) for each in model) if several else _module(model)
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    for each in optimizers:
        _check_optimizer(each)
    return UserObjects(model=whole, data=data, optimizers=optimizers, state=given["state"])


def _check_optimizer(optimizer: Any) -> None:
    """Raises `UserCodeError` for what is no optimizer of PyTorch's."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise UserCodeError(
                f"{type(optimizer).__name__} does not call the __init__ of torch.optim.Optimizer, so that its steps "
                "have no hooks, by which they become those of all ranks: call super().__init__(params, defaults) there"
            )
        return
    if optimizer is None:
        raise UserCodeError(
            "there is no optimizer: pass optimizer= to shoal.start. A loop that updates its weights by hand, as by "
            "p.data.add_(p.grad, alpha=-lr), makes torch.optim.SGD(model.parameters(), lr) and calls its step()"
        )
    inside = next(
        (f".{name}" for name, each in _attributes(optimizer) if isinstance(each, torch.optim.Optimizer)), None
    )
    raise UserCodeError(
        f"the optimizer is of type {type(optimizer).__name__}, which is no torch.optim.Optimizer: hand over "
        + ("one that is" if inside is None else f"the one that it wraps, optimizer{inside}, and go on to call this")
    )


def _attributes(wrapper: Any) -> Iterable[tuple[str, Any]]:
    return getattr(wrapper, "__dict__", {}).items()


def _module(model: Any) -> Any:
    """The module inside of a compiled one, which goes on to compute with it. Raises `UserCodeError`: see below."""
    inside = _inside(model)
    if isinstance(inside, DistributedDataParallel | DataParallel | FullyShardedDataParallel | FSDPModule):
        kind = "by fully_shard" if isinstance(inside, FSDPModule) else f"in {type(inside).__name__}"
        raise UserCodeError(
            f"the model is wrapped {kind}, which would sum or divide gradients a second time: hand over the plain "
            "module, and call that in the loop (layout.shard and memory.zero divide it)"
        )
    return inside


def _inside(model: Any) -> Any:
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def is_compiled(model: Any) -> bool:
    """Whether calls of `model`, or of one of several, run a compiled program."""
    models = model if isinstance(model, list | tuple) else [model]
    return any(isinstance(m, OptimizedModule) or getattr(m, "_compiled_call_impl", None) is not None for m in models)


def scaler_in(frame: FrameType | None) -> GradScaler | None:
    """The scaler of PyTorch that has scaled a loss, among the variables of `frame` and of those that called it."""
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, GradScaler) and value.is_enabled() and value._scale is not None:
                return value
        frame = frame.f_back
    return None


def data_of_script(data: Any) -> tuple[Any, DataLoader | None]:
    """The data sets, each sample as inputs alone; and the DataLoader of the training data. None and None: `[data]`
    names it.
    """
    if data is None or isinstance(data, Mapping):
        return None, None
    made = data if training_loader(data) is not None else as_source(data)
    train, held_out = made if _is_pair(made) else (made, None)
    loader = training_loader(train)
    held_out_loader = training_loader(held_out)
    sets = (
        as_source(train if loader is None else _sampled(loader)),
        held_out_items(held_out if held_out_loader is None else held_out_loader.dataset),
    )
    for part in sets:
        if part is not None and not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            raise UserCodeError(
                f"the data is of type {type(part).__name__}; shoal.start takes a data set with len(d) and d[i], an "
                "iterable or a function that makes one, a DataLoader of one of these, a pair (training, held out), or "
                "a table [data]"
            )
    return (_as_inputs(sets[0], loader), _as_inputs(sets[1], held_out_loader or loader)), loader


def with_loader(tables: dict[str, Any], data: Any) -> dict[str, Any]:
    """The tables of a run file, with what a DataLoader says of order and batches where they say nothing."""
    loader = training_loader(data)
    if loader is None:
        return tables
    for sentence in unread_arguments(loader) if place_from(os.environ) is None else []:
        say(f"shoal: {sentence}")
    table = {**order_of_loader(loader, tables["data"]), **tables["data"]}
    return {**tables, "data": table, "batch": {**batch_of_loader(loader), **tables.get("batch", {})}}


def types_of(model: Any) -> set[torch.dtype]:
    """The floating types of the parameters that a script hands over, in a module or several; none of a function."""
    models = [_inside(each) for each in (model if isinstance(model, list | tuple) else [model])]
    parameters = [each for one in models if isinstance(one, nn.Module) for each in one.parameters()]
    return {each.dtype for each in parameters if each.is_floating_point()}


def with_precision(tables: dict[str, Any], model: Any) -> dict[str, Any]:
    """The tables of a run file, for a model in float64 with its precision where they say none."""
    if "precision" in tables or types_of(model) != {torch.float64}:
        return tables
    return {**tables, "precision": {"kind": "float64"}}


def widened(model: Any, run_file: RunFile) -> list[str]:
    """A sentence where half-precision weights become float32 ones, which take twice the memory."""
    narrow = sorted(str(each).removeprefix("torch.") for each in types_of(model) & {torch.bfloat16, torch.float16})
    if not narrow or isinstance(run_file.precision, BFloat16Params):
        return []
    return [
        f"the model's {' and '.join(narrow)} weights are {'float64' if run_file.precision == Float64() else 'float32'} "
        'in this run: precision.kind = "bfloat16_params" keeps them in bfloat16, with float32 masters in the optimizer'
    ]


def _as_inputs(source: Any, loader: DataLoader | None) -> AsInputs | None:
    """The samples as inputs alone, put side by side as `loader` does it."""
    if source is None:
        return None
    if loader is None or loader.collate_fn is default_collate:
        return AsInputs(source)
    return Collated(source, loader.collate_fn)


def stop_in_reader(data: Any, directory: Path) -> None:
    """In a process that reads data for the run of that directory, the script ends here: raises `Reached`."""
    if reads_for(directory, os.environ):
        raise Reached(data)


def is_endless(train: AsInputs) -> bool:
    """Whether the samples are the items of an iterable, which has no number of them."""
    return isinstance(train.source, IterableSource)


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and all(part is None or may_be_data(part) for part in data)


ORDERS = ("stratify", "weights", "group_by_length")
"""Keys of `[data]` that draw an order of their own."""


def order_of_loader(loader: DataLoader | None, table: Mapping[str, Any]) -> dict[str, Any]:
    """The order of a DataLoader, where `table`, that of `[data]`, has none. Raises `UserCodeError` for one that Shoal
    cannot reproduce.
    """
    if any(table.get(key) is not None for key in ORDERS) or loader is None:
        return {}
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        return {}
    sampled = None if loader.batch_size is None else as_sampled(loader.dataset, loader.sampler)
    if sampled is None:
        own = loader.batch_sampler if loader.batch_size is None else loader.sampler
        raise UserCodeError(
            f"the DataLoader has a sampler of its own ({type(own).__name__}); Shoal divides the samples among ranks "
            "itself, so that a resumed run uses each once: leave the sampler out, use one of torch.utils.data, whose "
            "order Shoal makes, or say it by data.subset, data.weights or data.group_by_length"
        )
    return {"shuffle": sampled[1]}


def _sampled(loader: DataLoader) -> Any:
    """The data set of a DataLoader, as its sampler draws from it."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return loader.dataset
    sampled = as_sampled(loader.dataset, loader.sampler)
    return loader.dataset if sampled is None else sampled[0]


def samples_of_step(loader: DataLoader | None) -> int | None:
    """The samples of a global batch. With a DistributedSampler, a script's batch size is that of one rank."""
    if loader is None or loader.batch_size is None:
        return None
    sampler = loader.sampler
    return loader.batch_size * (sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1)


def batch_of_loader(loader: DataLoader) -> dict[str, Any]:
    """Keys of [batch] for the batches of a DataLoader: their samples, and the end of an epoch where there is one."""
    size = {} if loader.batch_size is None else {"global_samples": loader.batch_size}
    ends = not isinstance(loader.dataset, IterableDataset)
    return size | ({"epoch_end": "drop" if loader.drop_last else "short"} if ends else {})


def unread_arguments(loader: DataLoader | None) -> list[str]:
    """What of a DataLoader a run does not use, a sentence for each."""
    given = {
        "DistributedSampler": loader is not None and isinstance(loader.sampler, DistributedSampler),
        "drop_last": loader is not None and loader.drop_last and isinstance(loader.dataset, IterableDataset),
        "num_workers": loader is not None and loader.num_workers > 0,
        "worker_init_fn": loader is not None and loader.worker_init_fn is not None,
        "generator": loader is not None and loader.generator is not None,
    }
    does = {
        "DistributedSampler": f"Shoal divides the samples among ranks itself, in steps of {samples_of_step(loader)} "
        "samples where batch_samples is left out, the batch size of all its replicas",
        "drop_last": "an iterable is begun again where it ends, and the step goes on",
        "num_workers": "samples are read ahead by as many threads or processes as data.readers and reader_kind say",
        "worker_init_fn": "there are no worker processes",
        "generator": "the order of samples follows from run.seed",
    }
    return [f"the DataLoader's {name} is not used: {does[name]}" for name, is_given in given.items() if is_given]


def unsaved_scheduler(objects: UserObjects) -> list[str]:
    """A sentence where a scheduler of PyTorch's moves an optimizer's rates, and nothing of the script's is saved."""
    moved = any("initial_lr" in group for optimizer in objects.optimizers for group in optimizer.param_groups)
    if not moved or objects.state:
        return []
    return [
        "a scheduler moves the optimizer's rates, and state= is empty: a run that is resumed would begin it anew. Pass "
        'state={"scheduler": scheduler}'
    ]


# What a script's own loop cannot be: layouts, strategies and models that take the loop's work from it.


def require_own_loop(run_file: RunFile, *, model: Any, optimizer: Any) -> None:
    """Raises `ConfigError` for what a script's own loop, with this model and optimizer or several, cannot have."""
    _check_layout(run_file)
    _check_servers(run_file, model)
    _check_optimizers(run_file, optimizer)
    _check_compiled(run_file, model)
    if run_file.layout.tensor not in (1, None):
        _check_tensor(run_file, model=model, optimizer=optimizer)
    if run_file.memory.budget is not None:
        raise ConfigError(
            f'memory.budget = "{run_file.memory.budget}" is kept by counting what the run\'s own steps compute, and '
            "this loop is the script's: set keys of [memory] yourself, or let shoal.train run the loop"
        )


def _check_optimizers(run_file: RunFile, optimizer: Any) -> None:
    """Raises `ConfigError` for a precision that several optimizers cannot share."""
    if isinstance(run_file.precision, Float16) and isinstance(optimizer, list | tuple) and len(optimizer) > 1:
        raise ConfigError(
            f'precision.kind = "float16" with {len(optimizer)} optimizers: one loss scale would follow from all of '
            'them; use "bfloat16", or one optimizer'
        )


def _check_compiled(run_file: RunFile, model: Any) -> None:
    """Raises `ConfigError` where a compiled program would come upon collectives."""
    if is_compiled(model) and run_file.layout.shard != 1 and run_file.memory.zero == 3:
        raise ConfigError(
            "the model is compiled, and under memory.zero = 3 its layers fetch their weights while they compute, which "
            "a compiled program cannot: hand over the plain module, or set memory.zero to 1 or 2"
        )


def _check_tensor(run_file: RunFile, *, model: Any, optimizer: Any) -> None:
    """Raises `ConfigError` for what a script's own loop cannot have beside `layout.tensor`."""
    layout, memory, precision = run_file.layout, run_file.memory, run_file.precision
    refused = {
        f"layout.tensor_grid = {layout.tensor_grid}": layout.tensor_grid is not None,
        "layout.sequence_parallel = true": layout.sequence_parallel,
        f'memory.offload.parameters = "{memory.offload.parameters}"': memory.offload.parameters != "device",
        f'sync.kind = "{run_file.sync.variant}"': run_file.sync.variant != "allreduce",
        f'precision.kind = "{precision.variant}"': isinstance(precision, BFloat16Params | Float16 | Float8),
        "a compiled model": is_compiled(model),
        "several models": isinstance(model, list | tuple) and len(model) > 1,
        "several optimizers": isinstance(optimizer, list | tuple) and len(optimizer) > 1,
    }
    if (found := next((what for what, given in refused.items() if given), None)) is not None:
        raise ConfigError(
            f"layout.tensor = {layout.tensor} with {found}: a script's own loop has its model split over "
            "layout.tensor, divided over layout.shard and repeated over layout.replicate; leave one of the two out, or "
            "let shoal.train run the loop"
        )


def _check_servers(run_file: RunFile, model: Any) -> None:
    """Raises `ConfigError` for what would leave a rank without batches, or the script without its weights."""
    if run_file.sync.serving_only:
        raise ConfigError(
            f"sync.servers = {run_file.sync.serving_only}: dedicated servers run no script; set it to 0, or let "
            "shoal.train run the loop"
        )
    if isinstance(run_file.sync, ServerConfig) and isinstance(model, nn.Module) and tables_in(model):
        raise ConfigError(
            "the model has an EmbeddingTable, which would live on servers alone, out of reach of the script: let "
            "shoal.train run the loop, or use nn.Embedding"
        )


def _check_layout(run_file: RunFile) -> None:
    """Raises `ConfigError` for what takes the loop's own work from it."""
    layout = run_file.layout
    if run_file.elastic is not None:
        raise ConfigError("[elastic] needs the loop of shoal.train: leave the table out, or call shoal.train")
    for axis in ("pipeline", "context", "expert"):
        if getattr(layout, axis, 1) not in (1, None):
            raise ConfigError(
                f"layout.{axis} = {getattr(layout, axis)}: a script's own loop can be replicated, sharded and split "
                "(layout.replicate, layout.shard, layout.tensor); for the other axes let shoal.train run the loop"
            )
    if run_file.memory.loss_chunks > 1:
        raise ConfigError(
            f"memory.loss_chunks = {run_file.memory.loss_chunks}: a script's own loop computes its loss itself; leave "
            "it out, or let shoal.train run the loop"
        )
    observe = run_file.observe
    if run_file.gradients.schedule == "priority" or observe.noise_every_steps or observe.layer_norms_every_steps:
        raise ConfigError(
            'gradients.schedule = "priority", observe.noise_every_steps and observe.layer_norms_every_steps need the '
            "loop of shoal.train; leave them out"
        )
