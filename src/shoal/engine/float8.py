"""Linear layers that multiply in float8, as torchao has them (`Float8Linear`).

Forward and both products of the backward cast their factors to float8: inputs and weights to e4m3, gradients to e5m2
(rowwise: e4m3 all), each scaled by its own largest magnitude (Micikevicius et al., arXiv:2209.05433). Parameters keep
their names and their dtype. The layers of blocks are replaced; embeddings, head, norms and attention compute as under
bfloat16. A product needs sizes that are multiples of 16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from shoal.engine.config import Float8, PrecisionConfig
from shoal.errors import EnvironmentFault, MissingExtra, UserCodeError
from shoal.memory.blocks import blocks_of

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
