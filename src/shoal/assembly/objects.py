"""From the run file's tables to a model, its data and its loss, whether Shoal's own or the user's."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.assembly.sampling import sampled
from shoal.assembly.trainable import partly_trained, require_trainable
from shoal.assembly.user_code import call_named
from shoal.config.named import find_named
from shoal.data import build as data_build
from shoal.data.build import Dataset
from shoal.data.config import PythonData
from shoal.data.iterable import as_source, made_by, takes_start, without_loaders
from shoal.data.sample import describe
from shoal.engine.compute import enter_training, frozen_modules
from shoal.engine.config import LossConfig, PythonLoss, SquaredError
from shoal.engine.extra_state import HasStateDict
from shoal.engine.loss import Loss, cross_entropy, squared_error
from shoal.engine.precision import Precision, cast_floating
from shoal.errors import UserCodeError
from shoal.files import cache_folder
from shoal.maths.counter import key_of
from shoal.models.batch_norm import with_grouped_norm, with_synchronised_norm
from shoal.models.build import build as build_model
from shoal.models.build import initialise
from shoal.models.config import ForeignModel, ModelConfig, PythonModel
from shoal.models.huggingface.config import ForeignKeys, TransformersConfig, config_keys, vocabulary_of
from shoal.models.width import check_heads, follow_width
from shoal.parallel.traced.relay import declare
from shoal.runfile.run_file import RunFile


@dataclass(frozen=True)
class UserObjects:
    """What a script passes instead of naming it in a run file; None: the run file says. `optimizers` are its own, each
    with other parameters of the model; `state` are objects whose state is saved with the run's."""

    model: Any = None
    data: Any = None
    loss: Any = None
    optimizers: Sequence[Any] = ()
    state: Mapping[str, HasStateDict] = field(default_factory=dict)


def model_of(run_file: RunFile, given: UserObjects, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on `device`, its floating parameters in `dtype`.

    Shoal's own are built without storage and drawn parameter by parameter; a user's is built by the user, from
    generators seeded with the run's seed. Raises `UserCodeError` where the user's function gives no module.
    """
    model = skeleton_of(run_file, given)
    if model is not None:
        initialise(model, seed=run_file.run.seed, device=device, dtype=dtype)
        return model
    model = users_model(run_file, given)
    return placed(model, device, dtype)


def users_model(
    run_file: RunFile, given: UserObjects, around: AbstractContextManager[None] = nullcontext()
) -> nn.Module:
    """What the user's function builds, wherever and in whichever dtype it does; `around` its call. Raises
    `UserCodeError`: see above.
    """
    said = run_file.model
    base = _users_base(said, given, seed=run_file.run.seed)
    _seed_everything(run_file.run.seed)
    with around:
        model = _users_model(said, given)
        if base is not None and isinstance(model, nn.Module):
            if isinstance(said, TransformersConfig):
                check_heads(model.config, base.config)
            follow_width(model, base)
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else describe(model)
        raise UserCodeError(f"the model is {what}; it must be an nn.Module, ready to be called")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserCodeError("the model has no parameter that requires a gradient; there is nothing to train")
    require_trainable(model)
    if isinstance(said, ForeignKeys):
        if said.batch_norm == "grouped":
            assert said.group_samples is not None
            with_grouped_norm(model, said.group_samples)
        elif said.batch_norm == "synchronised":
            with_synchronised_norm(model)
        declare(model, roles=said.roles, counts=said.counts, parts=said.parts)
    return partly_trained(model, run_file)


def _refuse_narrowed(model: nn.Module, dtype: torch.dtype) -> None:
    """A layer in float64 between others computes in it, which casts in its forward rely on."""
    types = {each.dtype: name for name, each in model.named_parameters() if each.is_floating_point()}
    if torch.float64 in types and len(types) > 1 and dtype != torch.float64:
        other = next(found for found in types if found != torch.float64)
        raise UserCodeError(
            f"the parameter {types[torch.float64]} is float64, and {types[other]} is {_said(other)}: Shoal trains "
            f"a model in one type, that of precision.kind, and would make them all {_said(dtype)}. Build the "
            'layers in one type, or set precision.kind = "float64"'
        )


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def skeleton_of(run_file: RunFile, given: UserObjects) -> nn.Module | None:
    """One of Shoal's own models without storage; None where the model is the user's."""
    config = run_file.model
    if given.model is not None or isinstance(config, ForeignModel):
        return None
    with torch.device("meta"):
        return partly_trained(build_model(config), run_file)


def placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """On `device`, what is floating in `dtype`. `Module.to(dtype)` would drop the imaginary part of complex buffers.

    Raises `UserCodeError` for what has no shape yet, or layers in several types. Parameters without storage stay so.
    """
    _refuse_narrowed(model, dtype)
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UserCodeError(f"parameter {lazy[0]} has no shape yet; run the lazy module once before returning it")
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            continue
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        tensor.data = tensor.data.to(device, kind).contiguous()  # fused optimizers read gradients without their strides
    return model


def check_layout_independent(model: nn.Module, *, shares: int, global_samples: int, micro_samples: int | None) -> None:
    """Refuses batch statistics over whatever samples a rank happens to hold at a time, one of `shares` or less, and
    embeddings that write their weights by them.

    Raises `UserCodeError`.
    """
    whole = shares == 1 and (micro_samples is None or micro_samples >= global_samples)
    if whole:
        return
    enter_training(model, frozen_modules(model))
    for name, module in model.named_modules():
        if shares > 1 and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UserCodeError(
                f"module {name} ({type(module).__name__}) has max_norm = {module.max_norm:g}, by which its forward "
                "shortens the rows that it is asked for, on each rank those of other samples, so that ranks would have "
                "other weights: leave max_norm out, and shorten all rows behind an update, "
                "weight.data.renorm_(2, 0, max_norm)"
            )
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            over = (
                "one microbatch of the ranks, on GPUs alone, with the copies that a rank without samples computes"
                if isinstance(module, nn.SyncBatchNorm)
                else "the samples of one microbatch of one rank"
            )
            raise UserCodeError(
                f"module {name} ({type(module).__name__}) takes statistics over {over}, "
                'so the result would depend on the layout; set model.batch_norm = "synchronised" to take them '
                'over a microbatch of all ranks, or model.batch_norm = "grouped" and model.group_samples to take them '
                "over declared groups of samples, put it into eval() to freeze it, use GroupNorm or LayerNorm, or "
                "train on one process with whole steps (run.processes = 1, no batch.micro_samples)"
            )


def data_of(run_file: RunFile, given: UserObjects, environ: Mapping[str, str] = os.environ) -> Dataset:
    """The data to train and evaluate on. A user's function returns a data set, or a pair (training, held out)."""
    return sampled(run_file.data, _opened_data(run_file, given, environ), run_file.run.seed)


def _opened_data(run_file: RunFile, given: UserObjects, environ: Mapping[str, str]) -> Dataset:
    config = run_file.data
    if isinstance(given.data, Dataset):
        return given.data
    if given.data is None and not isinstance(config, PythonData):
        model = run_file.model
        foreign = isinstance(model, TransformersConfig)
        vocabulary = vocabulary_of(model) if foreign else getattr(model, "vocabulary", None)
        return data_build.build(config, batch=run_file.batch, vocabulary=vocabulary, cache=cache_folder(environ))
    data = _named_data(config) if isinstance(config, PythonData) and given.data is None else given.data
    data = without_loaders(as_source(without_loaders(data)))
    if isinstance(data, tuple) and _is_pair(data):
        return data_build.from_objects(data[0], data[1])
    return data_build.from_objects(data)


def _named_data(config: PythonData) -> Any:
    """What the function `data.build` returns, or the iterables that it makes."""
    function = find_named(config.build, key="data.build")

    def call(**more: Any) -> Any:
        return call_named(config.build, config.arguments | more, key="data.build")

    counts = "start" not in config.arguments and takes_start(function)
    return made_by(function, call, takes_start=counts)


def loss_of(config: LossConfig, given: UserObjects, precision: Precision) -> Loss:
    """The loss: one value per sample or per position of the targets. A user's own gets outputs in float32 where the
    model's are of fewer bits without autocast; those built in see to it themselves.
    """
    loss = given.loss
    if loss is None and isinstance(config, PythonLoss):
        loss = call_named(config.build, config.arguments, key="loss.build")
    if loss is None:
        loss = squared_error if isinstance(config, SquaredError) else cross_entropy
    if not callable(loss):
        raise UserCodeError(f"the loss is of type {type(loss).__name__}; it must be a callable of (outputs, targets)")
    if precision.mixed is None or loss in (squared_error, cross_entropy):
        return cast(Loss, loss)
    own = cast(Loss, loss)
    return lambda outputs, targets: own(cast_floating(outputs, torch.float32), targets)


def _is_pair(data: tuple[Any, ...]) -> bool:
    """(training, held out), and not a training set that happens to be a tuple of two samples."""
    sets = all(part is None or may_be_data(part) for part in data)
    return len(data) == 2 and sets and not isinstance(data[0], tuple)


def may_be_data(part: Any) -> bool:
    """Whether `part` has items, or may make something that has."""
    return callable(part) or hasattr(part, "__getitem__") or hasattr(part, "__iter__")


def _users_model(config: ModelConfig, given: UserObjects) -> Any:
    """What the user gave for a model: an object, or what a function of a script or of the run file returns."""
    if given.model is not None:
        ready = isinstance(given.model, nn.Module) or not callable(given.model)
        return given.model if ready else given.model()
    if isinstance(config, PythonModel):
        return call_named(config.build, config.arguments, key="model.build")
    if isinstance(config, TransformersConfig):
        from shoal.models.huggingface.build import build

        return build(config)
    return None


def _users_base(config: ModelConfig, given: UserObjects, *, seed: int) -> nn.Module | None:
    """The module at the width at which rates were found; None where the run file says none."""
    if not isinstance(config, ForeignKeys) or not config.base:
        return None
    if given.model is not None:
        raise UserCodeError("model.base with a module that the script builds itself: leave base out")
    written = config_keys(config) if isinstance(config, TransformersConfig) else config.arguments
    key = "config" if isinstance(config, TransformersConfig) else "arguments"
    _seed_everything(seed)
    return _users_model(msgspec.structs.replace(config, base={}, **{key: written | config.base}), given)


def _seed_everything(seed: int) -> None:
    torch.manual_seed(key_of(seed, "user model"))
    random.seed(key_of(seed, "user model"))
    np.random.seed(key_of(seed, "user model") % 2**32)
