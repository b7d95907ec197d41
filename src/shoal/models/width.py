"""How first values and rates of a module that says nothing of its width follow it: muP (Yang et al., arXiv:2203.03466).

The module is built twice, as the run has it and with the arguments at which rates were found (`model.base`). Which
dimensions of a parameter differ says which row of their table 3 is its own (`Widened`, from which `shoal.optim.mup` has
the rates). Whether the code that draws first values minds the width is not known, so they are measured: with s their
standard deviation here, s_base that of the other module, and m how many times its inputs have grown, they are
multiplied by

    s_base / s               where outputs alone grow, as of embeddings and biases
    s_base / (s sqrt(m))     where both grow
    s_base / (s m)           where inputs alone grow, as of a head

Constants, as of norms, stay. What a forward computes is the module's own: heads of attention have to keep their size
(`check_heads`), and a head that is tied to an embedding, which follows the width in another way, is refused.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from shoal.errors import UserCodeError
from shoal.models.roles import Widened, is_conv1d

_POWERS = {"input": 0.0, "hidden": 0.5, "output": 1.0}


def follow_width(model: nn.Module, base: nn.Module) -> None:
    """Changes the first values of `model`, and gives it `width_rules` (`shoal.models.roles.FollowsWidth`), relative to
    `base`. Raises `UserCodeError` where the two are not the same module in two widths.
    """
    owners, narrow = _owners(model), dict(base.named_parameters())
    named = dict(model.named_parameters())
    if named.keys() != narrow.keys():
        name = min(named.keys() ^ narrow.keys())
        raise UserCodeError(f"model.base: {name} is a parameter of one width alone; base may change widths, not layers")
    rules = {name: _rule(name, p.shape, narrow[name].shape, owners[id(p)]) for name, p in named.items()}
    found = {name: rule for name, rule in rules.items() if rule is not None}
    if not found:
        raise UserCodeError("model.base: no parameter has another shape than with model.base; leave base out")
    for name, rule in found.items():
        _scale(named[name], narrow[name], rule)
    object.__setattr__(model, "width_rules", found)


def _owners(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that have each parameter, by its id."""
    found: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found[id(parameter)].append(module)
    return found


def _rule(name: str, shape: torch.Size, base: torch.Size, owners: list[nn.Module]) -> Widened | None:
    """None for a parameter that does not grow."""
    if len(shape) != len(base):
        raise UserCodeError(f"model.base: {name} has {len(shape)} dimensions, and {len(base)} with model.base")
    times = {dim: own / other for dim, (own, other) in enumerate(zip(shape, base, strict=True)) if own != other}
    if not times:
        return None
    among = {_inputs(owner) for owner in owners}
    if len(among) > 1:
        raise UserCodeError(
            f"model.base: {name} is the weight of {' and '.join(sorted(type(owner).__name__ for owner in owners))}; an "
            "embedding and a head follow the width in different ways: untie them"
        )
    (inputs,) = among
    if len(times) > 1:
        grown = times[inputs] if inputs in times else next(iter(times.values()))
        if inputs not in times and len(set(times.values())) > 1:
            raise UserCodeError(
                f"model.base: {name} grows from {tuple(base)} to {tuple(shape)}, and it is not known which of its "
                f"dimensions {type(owners[0]).__name__} takes for inputs: let all widths grow alike"
            )
        return Widened("hidden", grown)
    ((dim, grown),) = times.items()
    if inputs is None and shape[0] > 1 and sum(size > 1 for size in shape) > 1:
        raise UserCodeError(
            f"model.base: {name} grows from {tuple(base)} to {tuple(shape)}, and it is not known whether "
            f"{type(owners[0]).__name__} takes what has grown for inputs: make it the weight of an nn.Linear or an "
            "nn.Embedding, or [1, ...] if it is added"
        )
    return Widened("output" if dim == inputs else "input", grown)


def _inputs(module: nn.Module) -> int | None:
    """The dimension of a weight that its inputs are; None where it is not known, as of norms and free parameters."""
    layers = (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
    if isinstance(module, layers) or (isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd)):
        return 1
    reads_rows = is_conv1d(module) or isinstance(module, _ConvTransposeNd | nn.Embedding | nn.EmbeddingBag)
    return 0 if reads_rows else None


def check_heads(config: Any, base: Any) -> None:
    """Raises `UserCodeError` unless heads of attention have one size in two configs of transformers."""
    own, other = _head_size(config), _head_size(base)
    if own != other:
        raise UserCodeError(
            f"model.base: heads of attention have {own:g} features, and {other:g} with model.base; muP keeps their "
            "size, so let base change num_attention_heads as well"
        )
    for name in getattr(config, "sub_configs", {}):
        check_heads(getattr(config, name, None), getattr(base, name, None))


def _head_size(config: Any) -> float:
    """0 where the config does not say it."""
    for name in ("head_dim", "d_kv"):
        if isinstance(size := getattr(config, name, None), int):
            return size
    width, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return width / heads if isinstance(width, int) and isinstance(heads, int) else 0.0


@torch.no_grad()
def _scale(parameter: Tensor, base: Tensor, rule: Widened) -> None:
    own, other = _spread(parameter), _spread(base)
    if own > 0 and other > 0:
        parameter.mul_(other / own / rule.times ** _POWERS[rule.grows])


def _spread(x: Tensor) -> float:
    return float(x.detach().double().std(correction=0)) if x.is_floating_point() else 0.0
