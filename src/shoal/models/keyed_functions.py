"""PyTorch's random functions, computed from the bits that a mode of keyed draws gives (`shoal.models.keyed_draws`).

Each handler is called as `handler(mode, function, *args, **kwargs)` in the place of the function.
"""

from __future__ import annotations

import ast
import linecache
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from shoal.models.laws import LAWS, Bits, Law


class Draws(Protocol):
    """Where the bits come from. `unkeyed`: see `KeyedDraws`."""

    unkeyed: set[str]

    def bits_for(self, shape: Sequence[int], *, device: torch.device, samples: bool = True) -> Bits:
        """See `KeyedDraws.bits_for`."""
        ...

    def mask_for(
        self, shape: Sequence[int], *, p: float, dtype: torch.dtype, device: torch.device, samples: bool = True
    ) -> Tensor:
        """See `KeyedDraws.mask_for`."""
        ...

    def counts_samples(self, length: int) -> bool:
        """See `KeyedDraws.counts_samples`."""
        ...

    def dim_of_samples(self, shape: Sequence[int]) -> int | None:
        """See `KeyedDraws.dim_of_samples`."""
        ...


def drawn(handler: Callable[..., Any], mode: Draws, function: Any, args: Any, kwargs: Any) -> Any:
    """What `handler` draws in the place of `function`: never a part of a program that torch.compile makes."""
    if "torch._dynamo" in sys.modules:  # whose import takes a second
        return _uncompiled(handler, mode, function, args, kwargs)
    return handler(mode, function, *args, **kwargs)


@_disable_dynamo
def _uncompiled(handler: Callable[..., Any], mode: Draws, function: Any, args: Any, kwargs: Any) -> Any:
    return handler(mode, function, *args, **kwargs)


AS_FLOAT32 = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Types whose numbers float32 holds exactly."""


@lru_cache(maxsize=1024)
def factor_of_kept(p: float, dtype: torch.dtype) -> float:
    """1 / (1 - p), rounded as `dtype` is."""
    return float(torch.ones((), dtype=dtype, device="cpu") / (1 - p))


def _scaled_mask(mode: Draws, x: Tensor, p: float, shape: Sequence[int] | None = None) -> Tensor:
    """1 / (1 - p) where an element stays, else 0. `p` may be a tensor, as it may in PyTorch."""
    shape, of_samples = x.shape if shape is None else shape, not isinstance(x, nn.Parameter)
    if p == 1:
        return x.new_zeros(shape)
    return mode.mask_for(shape, p=float(p), dtype=x.dtype, device=x.device, samples=of_samples)


def _dropout(
    mode: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or not 0 < p < 1:
        return func(input, p, training, inplace)
    mask = _scaled_mask(mode, input, p)
    return input.mul_(mask) if inplace else input * mask


def _channel_dropout(
    mode: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or not 0 < p < 1:
        return func(input, p, training, inplace)
    alone = input.ndim == _OF_ONE_SAMPLE.get(func)  # such a tensor counts channels first
    channels = input.shape[: 1 if alone else 2]
    mask = _scaled_mask(mode, input, p, (*channels, *[1] * (input.ndim - len(channels))))
    return input.mul_(mask) if inplace else input * mask


_OF_ONE_SAMPLE: Mapping[Any, int] = types.MappingProxyType({F.dropout1d: 2, F.dropout3d: 4})
"""The dimensions of a tensor that these take for a single sample's; `F.dropout2d` takes none for that."""


def _alpha_dropout(
    mode: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training or not 0 < p < 1:
        return func(input, p, training, inplace)
    saturated = -1.7580993408473766  # of SELU
    stays = _scaled_mask(mode, input, p) * (1 - p)
    scale = ((1 - p) * (1 + p * saturated**2)) ** -0.5
    out = scale * (input * stays + saturated * (1 - stays)) - scale * p * saturated
    return input.copy_(out) if inplace else out


def _of_torch(handler: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`handler` for functions of `torch` itself, which say `train`, and are in place where their name says so."""

    def adapted(mode: Draws, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        return handler(mode, F.dropout, input, p, train, func.__name__.endswith("_"))

    return adapted


_TORCH_DROPOUT, _TORCH_CHANNELS, _TORCH_ALPHA = map(_of_torch, (_dropout, _channel_dropout, _alpha_dropout))


def _native_dropout(mode: Draws, func: Any, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """With the elements that stay."""
    if train is False or not 0 < p < 1:
        return func(input, p, train)
    mask = _scaled_mask(mode, input, p)
    return input * mask, mask != 0


def _attention(
    mode: Draws, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Without dropout PyTorch's own kernels; with it, softmax(q k' / sqrt(d)) written out."""
    if dropout_p == 0:
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
        blind = (scores == -math.inf).all(-1, keepdim=True)  # queries that see nothing: zeros, no gradient
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    else:
        weights = scores.softmax(-1)
    return (weights * _scaled_mask(mode, weights, dropout_p)).to(value.dtype) @ value


def _recurrent(mode: Draws, func: Any, *args: Any) -> Any:
    """Layer by layer, dropping between them: of (input, hidden, weights, biases, layers, p, training, both, first)."""
    if isinstance(args[3], Sequence) or not args[6] or not args[5] or args[4] == 1:  # packed, or nothing to drop
        if isinstance(args[3], Sequence) and args[6] and args[7]:
            mode.unkeyed.add(f"{func.__name__} of packed sequences")
        return func(*args)
    x, hidden, weights, biases, layers, p, training, both, first = args
    states, ends = list(hidden) if isinstance(hidden, tuple | list) else [hidden], []
    rows, each = 1 + both, len(weights) // layers
    for layer in range(layers):
        own = [state[layer * rows : (layer + 1) * rows].contiguous() for state in states]
        given = tuple(own) if isinstance(hidden, tuple | list) else own[0]
        layer_weights = weights[layer * each : (layer + 1) * each]
        x, *last = func(x, given, layer_weights, biases, 1, 0.0, training, both, first)
        ends.append(last)
        if layer < layers - 1:
            x = x * _scaled_mask(mode, x, p)
    return (x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))


def _drawn(law: Law) -> Callable[..., Tensor]:
    """A random function whose result is overwritten, in its own shape and type, by numbers of `law`. What is drawn for
    a parameter, in place or as `torch.randn_like(weight)`, knows no samples, whatever its shape; nor does a tensor
    whose size the code spells out, as the coin of `torch.rand(1)`: it is as long in a microbatch of any size.
    """

    def handler(mode: Draws, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        samples = not _is_for_parameter(out, [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)])
        if samples and func in _SIZED:
            caller = _caller()
            samples = not _spells_size(caller.f_code, caller.f_lasti)
        if kwargs.get("generator") is not None:
            if samples and mode.dim_of_samples(out.shape) is not None:
                mode.unkeyed.add(f"{func.__name__}(generator=...)")
            return out
        with torch.no_grad():
            for part in (out.real, out.imag) if out.is_complex() else (out,):
                drawn = mode.bits_for(out.shape, device=out.device, samples=samples)
                part.copy_(law(drawn, out, args, kwargs))
        return out

    return handler


def _caller() -> types.FrameType:
    """The frame in which a random function is called: the first that is none of a mode's."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"].startswith(("shoal.models.keyed_", "torch._")) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_for_parameter(out: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether `out` is one, or drawn like one: of means or deviations that are parameters and not those of samples."""
    if isinstance(out, nn.Parameter):
        return True
    own = [isinstance(each, nn.Parameter) for each in given]
    return any(own) and (all(own) or (own[0] and given[0].shape == out.shape))


_SIZED = (torch.rand, torch.randn, torch.randint)


@lru_cache(maxsize=4096)
def _spells_size(code: types.CodeType, instruction: int) -> bool:
    """Whether the call of one of `_SIZED` at this place in `code` has its size in figures. Not where its source is not
    at hand.
    """
    first, last, begin, end = next(islice(code.co_positions(), instruction // 2, None))
    if first is None or last is None or begin is None or end is None:
        return False
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if len(lines) <= last - first:
        return False
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
        if not isinstance(call, ast.Call):
            return False
        named = [keyword.value for keyword in call.keywords if keyword.arg == "size"]
        sizes = named or (call.args[-1:] if ast.unparse(call.func).endswith("randint") else call.args)
        return bool(sizes) and bool([ast.literal_eval(size) for size in sizes])
    except (SyntaxError, ValueError):  # a file that has changed, a size that is computed
        return False


def _multinomial(
    mode: Draws, func: Any, input: Tensor, num_samples: int, replacement: bool = False, **kwargs: Any
) -> Tensor:
    """Each row by the inverse of its distribution function; several without replacement are the first of exponential
    waiting times at rates `input` (Efraimidis and Spirakis, 2006).
    """
    out = func(input, num_samples, replacement, **kwargs)
    if any(value is not None for value in kwargs.values()):
        return out
    rates = input.detach().double()
    if replacement or num_samples == 1:
        reached = rates.cumsum(-1)
        drawn = mode.bits_for(out.shape, device=out.device).uniform(torch.float64)
        found = torch.searchsorted(reached, drawn * reached[..., -1:], right=True)
        return out.copy_(found.clamp(max=input.shape[-1] - 1))
    drawn = mode.bits_for(input.shape, device=out.device, samples=input.ndim > 1)
    waits = -drawn.uniform(torch.float64).log() / rates
    if input.ndim == 1:  # of the batch's samples, or of what is none: each rank sees its own
        mode.unkeyed.add("multinomial")
    return out.copy_(waits.topk(num_samples, -1, largest=False).indices)


def _permutation(mode: Draws, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The same for every sample. One of as many as there are samples may be of the batch, of which ranks have parts."""
    out = func(*args, **kwargs)
    if kwargs.get("generator") is not None:
        return out
    drawn = mode.bits_for(out.shape, device=out.device, samples=False)
    if mode.counts_samples(len(out)):
        mode.unkeyed.add(func.__name__)
    return out.copy_(drawn.numbers.argsort())


def _generator_draw(mode: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    """No counter gives these numbers. PyTorch's generator does, seeded alike for what knows no samples, as the one Beta
    number of a mixup.
    """
    out = func(*args, **kwargs)
    if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
        return out
    if not isinstance(out, Tensor) or not out.is_cpu or mode.dim_of_samples(out.shape) is not None:
        mode.unkeyed.add(func.__name__)
        return out
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(mode.bits_for((), device=out.device, samples=False).numbers))
        return func(*args, **kwargs)


class _Torch:
    """`torch` for such a body, which may ask `torch.overrides` instead."""

    overrides = types.SimpleNamespace(has_torch_function_variadic=lambda *_: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _body(function: Any) -> Any:
    """A function of Python without the check by which it hands itself to a mode: what it calls meets the mode."""
    never: dict[str, Any] = {"torch": _Torch()}
    never |= {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    copied = types.FunctionType(
        function.__code__, {**function.__globals__, **never}, function.__name__, function.__defaults__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_GAMMAS = tuple(getattr(torch, name) for name in ("_standard_gamma", "_sample_dirichlet"))

BODIES: Mapping[Any, Any] = types.MappingProxyType(
    {
        function: _body(function)
        for function in (
            *(F.multi_head_attention_forward, F.gumbel_softmax),
            *(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices),
            *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_),
        )
    }
)
"""Functions of Python that draw inside, where no mode would see it: it is handed the whole of them."""

DROPPING = frozenset({
    _dropout, _channel_dropout, _alpha_dropout, _native_dropout, _TORCH_DROPOUT, _TORCH_CHANNELS, _TORCH_ALPHA,
    _attention, _recurrent,
})  # fmt: skip
"""Handlers that take nothing from the generator but what they drop."""

HANDLERS: Mapping[Any, Any] = types.MappingProxyType(
    {
        F.dropout: _dropout,
        **dict.fromkeys((torch.dropout, torch.dropout_), _TORCH_DROPOUT),
        **dict.fromkeys((torch.feature_dropout, torch.feature_dropout_), _TORCH_CHANNELS),
        **dict.fromkeys((torch.alpha_dropout, torch.alpha_dropout_), _TORCH_ALPHA),
        torch.native_dropout: _native_dropout,
        **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), _channel_dropout),
        **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
        **dict.fromkeys(BODIES, _dropout),
        **{function: _drawn(law) for function, law in LAWS.items()},
        **dict.fromkeys((torch.multinomial, Tensor.multinomial), _multinomial),
        torch.randperm: _permutation,
        **dict.fromkeys((torch.poisson, torch.binomial, *_GAMMAS), _generator_draw),
        **dict.fromkeys((F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.rrelu, F.rrelu), _generator_draw),
        F.alpha_dropout: _alpha_dropout,
        F.scaled_dot_product_attention: _attention,
    }
)
