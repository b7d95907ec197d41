"""Adapters: small trained parameters in the linear layers of a frozen model.

    LoRA        y = W x + s B A x                            A [rank, in] normal, B [out, rank] zero   arXiv:2106.09685
    DoRA        y = (1 + m) |W| / |W + s B A| (W + s B A) x  m [out] zero, norms of rows               arXiv:2402.09353
    bottleneck  y = z + U relu(D z),  z = W x                D [width, out] normal, U zero             arXiv:1902.00751
    prompt      tokens are embedded, P stands before them    P [tokens, width] normal                  arXiv:2104.08691

A layer computes what it did until its adapter has learned something. It stays an `nn.Linear` under its name, with the
same weight, so that `run.warm_start` takes a checkpoint of the model without adapters. DoRA's magnitude is relative to
that of the frozen weight, so that it begins at zero whatever the weights are; its norm counts as a constant in the
backward, as in section 4.3 of its paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.config.check import implementation_of
from shoal.errors import ConfigError, UserCodeError
from shoal.models.config import AdapterConfig, BitFit, Bottleneck, DoRA, LoRA, PromptTuning, QuantisationConfig
from shoal.models.roles import ZEROS, Normal, Role

NAMES = ("lora_a", "lora_b", "magnitude", "adapter_down", "adapter_up", "soft_prompt")
"""What the parameters of adapters are called in their layers."""


HEADS = ("head", "heads", "lm_head", "classifier", "fc", "score")
"""What output heads are called, which have no adapter and no mask unless they are named."""


def in_head(name: str) -> bool:
    """Whether a module or parameter is an output head, or in one."""
    return any(part in HEADS for part in name.split("."))


class AdaptedLinear(nn.Linear):
    """A linear layer with parameters of its own beside its weight and bias, which are those of `layer`."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias

    def _empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.weight.dtype, device=self.weight.device))


class LoRALinear(AdaptedLinear):
    """See the module's docstring."""

    def __init__(self, layer: nn.Linear, config: LoRA) -> None:
        super().__init__(layer)
        self.scale = config.scale
        self.lora_a, self.lora_b = (
            self._empty(config.rank, self.in_features),
            self._empty(self.out_features, config.rank),
        )

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return super().forward(input) + F.linear(F.linear(input, self.lora_a), self.lora_b) * self.scale

    def own_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        return {
            "lora_a": Role("replicated", Normal(1 / math.sqrt(self.in_features)), decay=False),
            "lora_b": Role("replicated", ZEROS, decay=False),
        }


class DoRALinear(LoRALinear):
    """See the module's docstring."""

    def __init__(self, layer: nn.Linear, config: DoRA) -> None:
        super().__init__(layer, config)
        self.magnitude = self._empty(self.out_features)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        factor = (1 + self.magnitude) * _dora_ratio(self.weight, self.lora_a, self.lora_b, self.scale)
        low_rank = F.linear(F.linear(input, self.lora_a), self.lora_b) * self.scale
        found = (F.linear(input, self.weight) + low_rank) * factor
        return found if self.bias is None else found + self.bias

    def own_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        return super().own_roles() | {"magnitude": Role("replicated", ZEROS, decay=False)}


class BottleneckLinear(AdaptedLinear):
    """See the module's docstring."""

    def __init__(self, layer: nn.Linear, config: Bottleneck) -> None:
        super().__init__(layer)
        self.adapter_down = self._empty(config.width, self.out_features)
        self.adapter_up = self._empty(self.out_features, config.width)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        found = super().forward(input)
        return found + F.linear(F.relu(F.linear(found, self.adapter_down)), self.adapter_up)

    def own_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        return {
            "adapter_down": Role("replicated", Normal(1 / math.sqrt(self.out_features)), decay=False),
            "adapter_up": Role("replicated", ZEROS, decay=False),
        }


class SoftPrompt(nn.Module):
    """`count` trained vectors of `width` features before what a sequence is embedded to."""

    def __init__(self, count: int, like: Tensor) -> None:
        super().__init__()
        self.count = count
        self.soft_prompt = nn.Parameter(torch.empty(count, like.shape[1], dtype=like.dtype, device=like.device))

    def forward(self, embedded: Tensor) -> Tensor:
        """`[batch, seq, width]` to `[batch, count + seq, width]`."""
        return torch.cat([self.soft_prompt.to(embedded.dtype).expand(len(embedded), -1, -1), embedded], dim=1)

    def own_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        return {"soft_prompt": Role("replicated", Normal(PROMPT_STD), decay=False)}


PROMPT_STD = 0.02
"""That of embeddings."""


@runtime_checkable
class TakesPrompt(Protocol):
    """A model of tokens whose forward puts a prompt before them, and gives no outputs for it."""

    def take_prompt(self, count: int) -> None:
        """From now on. Raises `ConfigError` where it cannot."""
        ...


@torch.no_grad()
def _dora_ratio(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """|W| / |W + s B A| of each row."""
    return weight.norm(dim=1) / (weight + scale * (lora_b @ lora_a)).norm(dim=1)


def adapt(model: nn.Module, config: AdapterConfig) -> None:
    """Freezes `model` and puts adapters into its linear layers, in place. Ties stay ties.

    Raises `ConfigError` where a pattern matches nothing.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for pattern in config.train:
        if not _unfreeze(model, [pattern]):
            raise ConfigError(f'adapter.train: "{pattern}" matches no parameter of this model; correct it')
    if isinstance(config, BitFit):
        _unfreeze_biases(model, config)
        return
    if isinstance(config, PromptTuning):
        if not isinstance(model, TakesPrompt):
            raise ConfigError(
                f'adapter.kind = "prompt": {type(model).__name__} takes no prompt; use a gpt, a moe, a causal decoder '
                'of transformers, or adapter.kind = "lora"'
            )
        model.take_prompt(config.tokens)
        return
    make = implementation_of(config)
    found = chosen_layers(model, config.layers, key="adapter.layers")
    _replace(model, {layer: make(layer, config) for layer in found.values()})


def _replace(model: nn.Module, by: Mapping[nn.Linear, AdaptedLinear]) -> None:
    """Puts other modules into the places of some, in all that share them."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Linear) and module in by:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, by[module])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer) and {module.linear1, module.linear2} & {*by.values()}:
            module.activation_relu_or_gelu = 0  # an evaluation would go by the weights, and not call the layers


# Some models, such as torchvision's Swin, compute with `layer.weight` and never call the layer: what stands in its
# place does nothing there.


class BypassWatch:
    """Looks at what is computed inside: a forward of `model`, or of parts of it. Raises `ConfigError` in the end where
    that has used the weight of a layer of `table` ("adapter" or "quantisation") in a product and not called the layer.
    """

    def __init__(self, model: nn.Module, *, table: str) -> None:
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}
        self._model, self._table = type(model).__name__, table
        self._inside, self._called, self._uses = ExitStack(), set[nn.Module](), _Products(())

    def __enter__(self) -> None:
        self._called, self._uses = set(), _Products(layer.weight for layer in self.layers.values())
        for layer in self.layers.values():
            self._inside.callback(layer.register_forward_pre_hook(lambda layer, _: self._called.add(layer)).remove)
        self._inside.enter_context(self._uses)

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._inside.close()
        called, taken = self._called, self._uses.taken
        self._uses = _Products(())
        for name, layer in self.layers.items():
            if kind is None and layer not in called and id(layer.weight) in taken:
                raise ConfigError(
                    f"{self._table}.layers: {self._model} computes with the weight of {name} and does not call the "
                    f"layer, so that [{self._table}] would have no effect there: name layers without it"
                )


def refuse_bypassed_layers(model: nn.Module, *, table: str) -> None:
    """From now on the first forward of `model` that does not raise goes through a `BypassWatch`."""
    watch, hooks = BypassWatch(model, table=table), ExitStack()
    if not watch.layers:
        return

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if output is not None:
            hooks.close()
        watch.__exit__(None if output is not None else UserCodeError)

    hooks.callback(model.register_forward_pre_hook(lambda module, args: watch.__enter__()).remove)
    hooks.callback(model.register_forward_hook(end, always_call=True).remove)


_PRODUCTS = frozenset(
    {
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "einsum"),
        *("inner", "tensordot", "bilinear", "embedding", "conv1d", "conv2d", "conv3d", "multi_head_attention_forward"),
        *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    }
)
"""What products are called in PyTorch."""


class _Products(TorchFunctionMode):
    """Inside, `taken` are the ids of the `weights` that products take, as they are or with others in a tensor. A
    weight of which no more than a norm is computed is that of a layer which this forward may have left out.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.taken = set[int]()
        self._within = {id(weight): {id(weight)} for weight in weights}
        self._made: list[Tensor] = []  # kept, so that no other tensor gets the id of one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        within = {weight for each in tree_leaves((args, kwargs)) for weight in self._within.get(id(each), ())}
        if within and getattr(func, "__name__", "").partition(".")[0] in _PRODUCTS:
            self.taken |= within
        elif within:
            for each in tree_leaves(found):
                if isinstance(each, Tensor) and each.ndim > 1:
                    self._within[id(each)] = within | self._within.get(id(each), set())
                    self._made.append(each)
        return found


def chosen_layers(model: nn.Module, patterns: tuple[str, ...], *, key: str) -> dict[str, nn.Linear]:
    """The linear layers of `model` that `patterns` name; of `("*",)` all but output heads and what is tied: an
    embedding that has the layer's weight would change with it when it is exported.

    Raises `ConfigError`, which names the `key`, where a pattern matches nothing, or names a layer that is tied.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    tied = _tied(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ConfigError(
                f'{key}: "{pattern}" matches no nn.Linear; this model has {", ".join(list(layers)[:3])}, ...'
            )
    if patterns == ("*",):
        found = {name: layer for name, layer in layers.items() if not in_head(name) and layer.weight not in tied}
        if not found:
            turned = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2 of transformers
            repair = f"name {next(iter(layers), 'one')} to have it so, or leave the table out"
            raise ConfigError(
                f"{key}: {type(model).__name__} has no nn.Linear beside its output head; "
                + ("its layers are Conv1D, which model.lora_rank adapts by peft" if turned else repair)
            )
        return found
    found = {n: layer for n, layer in layers.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    shared = next((name for name, layer in found.items() if layer.weight in tied), None)
    if shared is not None:
        raise ConfigError(f"{key}: the weight of {shared} is another module's as well; leave it out, or untie it")
    return found


def _tied(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that several modules of `model` have."""
    own = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    return {parameter for parameter, modules in own.items() if modules > 1}


def _unfreeze(model: nn.Module, patterns: Sequence[str]) -> bool:
    """Trains the parameters that the patterns name. Returns whether there are any."""
    found = [p for name, p in model.named_parameters() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for parameter in found:
        parameter.requires_grad_(True)
    return bool(found)


def _unfreeze_biases(model: nn.Module, config: BitFit) -> None:
    having = [name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"]
    if not having:
        raise ConfigError('adapter.kind = "bitfit": this model has no biases; use adapter.kind = "lora"')
    for pattern in config.layers:
        if not _unfreeze(model, [f"{pattern}.bias", "bias"] if pattern == "*" else [f"{pattern}.bias"]):
            some = ", ".join(name.removesuffix(".bias") for name in having[:3])
            raise ConfigError(
                f'adapter.layers: "{pattern}" matches no layer that has a bias; this model has {some}, ...'
            )


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` is an adapter's, which a checkpoint of the model without adapters does not have."""
    return name.rpartition(".")[2] in NAMES


@torch.no_grad()
def merged(weights: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, Tensor]:
    """The weights of the model without adapters that computes the same; a bottleneck's stay, which no weight can be."""
    if not isinstance(config, LoRA):
        return dict(weights)
    found = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    for name in [name for name in weights if name.endswith(".lora_a")]:
        layer = name.removesuffix(".lora_a")
        weight, a, b = weights[f"{layer}.weight"], weights[name], weights[f"{layer}.lora_b"]
        found[f"{layer}.weight"] = weight + config.scale * (b @ a)
        if isinstance(config, DoRA):
            factor = (1 + weights[f"{layer}.magnitude"]) * _dora_ratio(weight, a, b, config.scale)
            found[f"{layer}.weight"] *= factor[:, None]
    return found


# Quantisation-aware training: the forward rounds weights to few bits, the backward passes the rounding by.
#
#     s = max |w| / q_max  of each row, or of each group of a row       q = round(w / s)
#     y = (s q) x,         dL/dw = dL/d(s q)                            the straight-through estimator, arXiv:1308.3432
#
# Scales are symmetric and follow the weights in every forward (Jacob et al., arXiv:1712.05877, without their moving
# averages, which only activations need; these stay as they are). A layer stays an `nn.Linear` under its name with the
# weight that is trained, so that checkpoints are those of the plain model; `integers` gives what is to be deployed.


SCALE = "_scale"
"""What the name of a weight's scales has more than that of the weight."""


class QuantisedLinear(AdaptedLinear):
    """A linear layer that computes with rounded weights."""

    def __init__(self, layer: nn.Linear, config: QuantisationConfig) -> None:
        super().__init__(layer)
        self.config = config

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return F.linear(input, rounded(self.weight, self.config), self.bias)


def rounded(weight: Tensor, config: QuantisationConfig) -> Tensor:
    """`weight` `[out, in]` as integers of `config` stand for it; its gradient is that of `weight`."""
    numbers, scales = integers(weight.detach(), config)
    grid = restored(numbers, scales, dtype=weight.dtype)
    return weight + (grid - weight).detach()


def integers(weight: Tensor, config: QuantisationConfig) -> tuple[Tensor, Tensor]:
    """The integers `[out, in]`, int8, and the scales `[out, groups]` of a weight."""
    groups = weight.unflatten(1, (-1, config.group or weight.shape[1]))
    scales = groups.abs().amax(2) / config.largest
    numbers = (groups / scales.clamp(min=torch.finfo(weight.dtype).tiny)[..., None]).round()
    return numbers.clamp(-config.largest, config.largest).to(torch.int8).flatten(1), scales


def restored(numbers: Tensor, scales: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The weight `[out, in]` that integers and scales stand for."""
    groups = numbers.unflatten(1, (scales.shape[1], -1)).to(dtype)
    return (groups * scales.to(dtype)[..., None]).flatten(1)


def quantise(model: nn.Module, config: QuantisationConfig) -> None:
    """Has the linear layers of `model` that `config` names compute with rounded weights, in place.

    Raises `ConfigError` where a pattern matches nothing, or the group does not divide a layer.
    """
    found = chosen_layers(model, config.layers, key="quantisation.layers")
    for name, layer in found.items():
        if config.group is not None and layer.in_features % config.group:
            raise ConfigError(
                f"quantisation.group = {config.group}: the rows of {name} have {layer.in_features} weights, which it "
                "does not divide; use another, or leave the layer out of quantisation.layers"
            )
    _replace(model, {layer: QuantisedLinear(layer, config) for layer in found.values()})


def deployed(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """`weights` with int8 integers in the place of those that layers of `model` round, and their scales under
    `<weight>_scale`.
    """
    found = dict(weights)
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            weight = f"{name}.weight"
            found[weight], found[weight + SCALE] = integers(weights[weight], module.config)
    return found
