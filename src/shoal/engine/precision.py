"""Precision: the dtype of parameters, the autocast of the forward, and the scale of the loss.

Parameters, gradients, reductions and norms are float32 or float64. bfloat16 and float16 are autocast: matrix products
run in them, what needs range does not. Under bfloat16_params there is no autocast: the modules compute with parameters
in bfloat16, on inputs in it, and the optimizer steps float32 masters (`shoal.gradients.masters`). Under float8 blocks
have linear layers of their own beside the autocast of bfloat16. float16's gradients underflow, so the loss is
multiplied by a scale before the backward and the gradients divided by it before the optimizer (arXiv:1710.03740, 3.2).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from shoal.engine.config import BFloat16, BFloat16Params, Float8, Float16, Float64, PrecisionConfig
from shoal.errors import EnvironmentFault, MissingExtra, UserCodeError
from shoal.gradients.masters import MixedPrecision, in_float32, narrows
from shoal.memory.recompute import blocks_of

T = TypeVar("T")

SMALLEST_SCALE = 1.0


@dataclass
class LossScaler:
    """The scale of the loss. Dynamic: halved after an overflow, doubled after `growth_steps` finite steps."""

    scale: float
    dynamic: bool
    growth_steps: int
    finite_in_a_row: int = 0

    def update(self, *, finite: bool) -> None:
        """Learns of a step. A fixed scale stays."""
        if not self.dynamic:
            return
        self.finite_in_a_row = self.finite_in_a_row + 1 if finite else 0
        if not finite:
            self.scale = max(SMALLEST_SCALE, self.scale / 2)
        elif self.finite_in_a_row >= self.growth_steps:
            self.scale, self.finite_in_a_row = self.scale * 2, 0

    def to_state(self) -> dict[str, Any]:
        return {"dynamic": self.dynamic, "scale": self.scale, "finite_in_a_row": self.finite_in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved scale; a run file that now says something else keeps what it says."""
        if self.dynamic and state["dynamic"]:
            self.scale, self.finite_in_a_row = float(state["scale"]), int(state["finite_in_a_row"])


@dataclass(frozen=True)
class Precision:
    """`parameters`: the dtype that the model is drawn and stepped in. `compute`: that of autocast, None without it.
    `mixed`: the narrower dtype that modules compute with, None: `parameters`.
    """

    parameters: torch.dtype
    compute: torch.dtype | None
    mixed: MixedPrecision | None = None

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Around the forward and the loss."""
        if self.compute is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.compute)

    def cast(self, inputs: Any) -> Any:
        """A model's inputs in the type that its modules compute with, what is floating in them."""
        return inputs if self.mixed is None else cast_floating(inputs, self.mixed.param_dtype)

    def computing(self, model: nn.Module) -> Callable[..., Any]:
        """`model`, called with its parameters in the type that modules compute with, where they are kept in another."""
        if self.mixed is None:
            return model
        dtype, kept = self.mixed.param_dtype, in_float32(model)
        wide = {name: parameter for name, parameter in model.named_parameters() if narrows(parameter, kept)}

        def called(*args: Any, **kwargs: Any) -> Any:
            own = {name: parameter.to(dtype) for name, parameter in wide.items()}
            return torch.func.functional_call(model, own, args, kwargs)

        return called if wide else model


def cast_at_borders(model: nn.Module, mixed: MixedPrecision) -> list[RemovableHandle]:
    """`model` casts what it is called with, and returns float32 (`cast_forward_inputs` and `output_dtype` of FSDP2)."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating((args, kwargs), mixed.param_dtype)

    def after(module: nn.Module, args: Any, outputs: Any) -> Any:
        return cast_floating(outputs, torch.float32)

    return [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """The floating tensors of a tree of tuples, lists, dictionaries and transformers' outputs in `dtype`."""
    return tree_map_only(torch.Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


def precision_of(config: PrecisionConfig) -> Precision:
    """What a table `[precision]` means."""
    if isinstance(config, Float64):
        return Precision(torch.float64, None)
    if isinstance(config, BFloat16 | Float8):
        return Precision(torch.float32, torch.bfloat16)
    if isinstance(config, BFloat16Params):
        return Precision(torch.float32, None, MixedPrecision(torch.bfloat16, getattr(torch, config.reduce_dtype)))
    return Precision(torch.float32, torch.float16 if isinstance(config, Float16) else None)


@contextlib.contextmanager
def whole_float32() -> Iterator[None]:
    """Products of float32 are of float32. Otherwise GPUs may round their factors to 10 bits (TF32): convolutions do
    unless they are told, matrix products where a script has asked for it; and two layouts, whose batches have other
    sizes, differ by that.
    """
    cudnn: Any = torch.backends.cudnn  # the stubs lack its parts
    mkldnn: Any = torch.backends.mkldnn
    kinds = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul)
    before = [kind.fp32_precision for kind in kinds]
    # PyTorch has two ways to say it, and raises where the older one is read and the newer one says something else. Its
    # compiler and FlexAttention read the older one.
    matmul, convolved = _or_none(torch.get_float32_matmul_precision), _or_none(lambda: cudnn.allow_tf32)
    try:
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if convolved is not None:
            cudnn.allow_tf32 = convolved
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


def _or_none(read: Callable[[], T]) -> T | None:
    """None where a script has used both ways, and they differ."""
    try:
        return read()
    except RuntimeError:
        return None


def scaler_of(config: PrecisionConfig) -> LossScaler:
    """The loss scale of a table `[precision]`; a fixed 1 for all but float16."""
    if not isinstance(config, Float16):
        return LossScaler(1.0, dynamic=False, growth_steps=1)
    if isinstance(config.loss_scale, str):
        return LossScaler(config.initial_scale, dynamic=True, growth_steps=config.growth_steps)
    return LossScaler(config.loss_scale, dynamic=False, growth_steps=config.growth_steps)


# Linear layers that multiply in float8, as torchao has them (`Float8Linear`).
#
# Forward and both products of the backward cast their factors to float8: inputs and weights to e4m3, gradients to e5m2
# (rowwise: e4m3 all), each scaled by its own largest magnitude (Micikevicius et al., arXiv:2209.05433). Parameters keep
# their names and their dtype. The layers of blocks are replaced; embeddings, head, norms and attention compute as under
# bfloat16. A product needs sizes that are multiples of 16.


MULTIPLE = 16
OLDEST_CAPABILITY = (8, 9)
"""Of CUDA devices with float8 products: Ada and Hopper."""


def use_float8(model: nn.Module, config: PrecisionConfig, *, device: torch.device) -> None:
    """Replaces the linear layers in the blocks of `model`, in place, where `config` asks for float8.

    Raises:
        MissingExtra: torchao is not installed.
        EnvironmentFault: `device` has no float8 products, and `config` does not emulate them.
        UserCodeError: no block has a linear layer whose sizes are multiples of 16.
    """
    if not isinstance(config, Float8):
        return
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtra("torchao", extra="float8", purpose='precision.kind = "float8"')
    _check_device(device, config)
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear_utils import convert_to_float8_training

    wanted = {id(layer) for layer in _layers(model)}
    if not wanted:
        raise UserCodeError(
            f"{type(model).__name__} has no block with a linear layer whose sizes are multiples of {MULTIPLE}: hold "
            'blocks in an nn.ModuleList, change their widths, or set precision.kind = "bfloat16"'
        )
    recipe = replace(Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in wanted, config=recipe)


def _layers(model: nn.Module) -> Iterator[nn.Linear]:
    for block in blocks_of(model).values():
        for module in block.modules():
            if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
                continue
            if module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0:
                yield module


def _check_device(device: torch.device, config: Float8) -> None:
    if config.emulate:
        return
    found = device.type
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or capability >= OLDEST_CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} (compute capability {'.'.join(map(str, capability))})"
    raise EnvironmentFault(
        f'precision.kind = "float8" on {found}: float8 products need a GPU of compute capability 8.9 or newer (Ada, '
        'Hopper, Blackwell); use precision.kind = "bfloat16", or set precision.emulate = true to see what rounding does'
    )
