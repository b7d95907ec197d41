"""Random numbers that a user's module draws, made a function of (seed, step, layer, sample, position).

`F.dropout` takes its mask from a generator whose state depends on everything drawn before, and so on how samples are
cut. `KeyedDraws` is a mode of PyTorch under which dropout (that of attention and of recurrent layers, too) and the
common random functions take their numbers from a counter instead, as `shoal.models.dropout.KeyedDropout` does:

    bits(bits(sample key, layer key), index of the element within its sample)

The layer is the innermost module that is being called, by name, with the number of its call in this forward and of the
draw in this call. So a stage of a pipeline and a repeated forward draw what the whole model would. The dimension of
samples is found by its length: dim 0, else a dim 0 of all tokens, else dim 1, else a dim 0 that holds several rows of
each. A tensor without them, such as a weight, is drawn from (seed, step, layer): the same on every rank. On ranks that
hold a part of a sample, `Extent`s say where their slices stand in the whole.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from shoal.errors import UserCodeError
from shoal.maths.counter import bits, key_of, normal, uniform


@dataclass(frozen=True)
class Extent:
    """Slices of a dimension that a rank holds: their places in the whole, int64, and the length of the whole."""

    places: Tensor
    whole: int


@dataclass(frozen=True)
class Inside:
    """What a rank of `tensor` holds between a column and a row layer; `heads` None where features stand alone.

    `features` None: in blocks on a grid, of which a draw cannot know its part.
    """

    features: Extent | None
    heads: Extent | None = None


@dataclass(frozen=True)
class Slices:
    """What a rank holds of each sample. `sequence` gives, for the tokens of a sample that reach this rank, the extents
    of what it may find in dim 1, by their length. `columns` are the names of split layers behind which a part of the
    features follows, `rows` those of layers that end it.
    """

    sequence: Callable[[int], Mapping[int, Extent]] | None = None
    columns: Mapping[str, Inside] = field(default_factory=dict)
    rows: frozenset[str] = frozenset()


@dataclass
class _Call:
    """A call of a module that is under way; `number` counts the calls of one forward, None where that is unknown."""

    module: str
    number: int | None
    draws: int = 0
    inside: Inside | None = None
    entered_here: bool = False


@dataclass(frozen=True)
class Moment:
    """The state of `KeyedDraws` between two draws of a forward."""

    step: int
    keys: Tensor | None
    tokens: int
    sequence: Mapping[int, Extent]
    calls: Sequence[_Call]
    counts: Mapping[str, int]


class KeyedDraws(TorchFunctionMode):
    """The mode, for the modules of `model`, which must be called while it is entered.

    `one_at_a_time`: a backward follows its forward before the next begins, so that a forward that is repeated in the
    backward is the last one. `unkeyed` has the names of functions that were called and that draw from PyTorch's
    generator, which knows no samples: what they return depends on the layout.
    """

    def __init__(self, model: nn.Module, *, seed: int, one_at_a_time: bool = True) -> None:
        super().__init__()
        self._model, self._seed, self.one_at_a_time = model, seed, one_at_a_time
        self.slices = Slices()
        self.unkeyed: set[str] = set()
        self._keys: Tensor | None = None
        self._step, self._tokens, self._entered, self._replays = 0, 0, 0, 0
        self._calls: list[_Call] = []
        self._counts: dict[str, int] = {}
        self._sequence: Mapping[int, Extent] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before(name))
            module.register_forward_hook(self._after(name), always_call=True)

    def begin(self, step: int, sample_keys: Tensor, *, tokens: int) -> None:
        """A forward follows, of samples with these keys, int64 `[samples]`, of which this rank gets so many tokens."""
        self._step, self._keys, self._tokens = step, sample_keys, tokens
        self._calls, self._counts = [], {}
        self._sequence = {} if self.slices.sequence is None else self.slices.sequence(tokens)

    def moment(self) -> Moment:
        """Where this forward stands: what `replaying` goes back to."""
        calls = [replace(call) for call in self._calls]
        return Moment(self._step, self._keys, self._tokens, self._sequence, calls, dict(self._counts))

    @contextmanager
    def replaying(self, moment: Moment) -> Iterator[None]:
        """Around the part of a forward that began at `moment` and is repeated in the backward."""
        before = self.moment()
        self._go_to(moment)
        self._replays += 1
        try:
            with self:  # autograd leaves every mode
                yield
        finally:
            self._replays -= 1
            self._go_to(before)

    @contextmanager
    def from_the_start(self) -> Iterator[None]:
        """Around the model's own forward where a part of a chain calls it past its hooks: its draws are those of a
        whole forward, whatever parts ran before, and however it is left.
        """
        before = self.moment()
        self._calls, self._counts = [_Call("", 0)], {}
        try:
            yield
        finally:
            self._go_to(before)

    def _go_to(self, moment: Moment) -> None:
        self._step, self._keys, self._tokens, self._sequence = moment.step, moment.keys, moment.tokens, moment.sequence
        self._calls, self._counts = [replace(call) for call in moment.calls], dict(moment.counts)

    def __enter__(self) -> KeyedDraws:
        self._entered += 1
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered -= 1
        super().__exit__(kind, error, trace)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is None or self._keys is None or not self._model.training:
            return func(*args, **kwargs)
        if func in _BODIES:
            with self:
                return _BODIES[func](*args, **kwargs)
        if not self._calls and not (_in_backward() and handler in _DROPPING):
            return func(*args, **kwargs)
        return handler(self, func, *args, **kwargs)

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if not self._entered:
                return
            count = self._counts.get(name, 0)
            if _in_backward() and not self._replays:
                known = count == 1 and self.one_at_a_time
                self._calls.append(_Call(name, 0 if known else None, entered_here=True))
                self.__enter__()  # autograd leaves every mode
            else:
                self._counts[name] = count + 1
                self._calls.append(_Call(name, count))

        return before

    def _after(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not self._entered or not self._calls:
                return
            if self._calls.pop().entered_here:
                self.__exit__(None, None, None)
            if self._calls and name in self.slices.columns:
                self._calls[-1].inside = self.slices.columns[name]
            elif self._calls and name in self.slices.rows:
                self._calls[-1].inside = None

        return after

    def bits_for(self, shape: Sequence[int], *, device: torch.device, samples: bool = True) -> Tensor:
        """64 random bits for each element of a tensor of this shape, the next draw of the module that is called."""
        if not self._calls:
            raise _repeated("a function that is no module")
        call = self._calls[-1]
        if call.number is None:
            raise _repeated(f"the module {call.module}")
        key = key_of(self._seed, "draw", call.module, call.number, call.draws)
        call.draws += 1
        assert self._keys is not None
        dim, inner = self._samples_of(shape) if samples else (None, tuple(shape))
        index = self._index(inner, device)
        if dim is None:
            return bits(key_of(key, "step", self._step), index)
        keys = bits(self._keys.to(device), torch.full_like(self._keys, key, device=device))
        drawn = bits(keys.view(-1, *[1] * len(inner)), index[None])
        return drawn.movedim(0, dim).reshape(shape)

    def _samples_of(self, shape: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
        """Which dimension counts the samples, and the shape of one; None where nothing does."""
        assert self._keys is not None
        samples = len(self._keys)
        if shape and shape[0] == samples:
            return 0, tuple(shape[1:])
        if len(shape) > 1 and shape[1] == samples and not self._are_rows(shape[0]):
            return 1, (shape[0], *shape[2:])
        if shape and shape[0] and shape[0] % samples == 0:
            return 0, (shape[0] // samples, *shape[1:])
        return None, tuple(shape)

    def _are_rows(self, length: int) -> bool:
        """Are that many rows those of the tokens of all samples, whole or in slices? Of one sample there is no telling,
        and no need: its tokens stand in dim 0 either way.
        """
        assert self._keys is not None
        samples = len(self._keys)
        return samples > 1 and length in {samples * tokens for tokens in (self._tokens, *self._sequence)}

    def _index(self, inner: Sequence[int], device: torch.device) -> Tensor:
        """The index within its whole sample of every element of this rank's part `inner` of one."""
        extents = dict(self._extents(inner))
        flat = torch.zeros((), dtype=torch.int64, device=device)
        for dim, length in enumerate(inner):
            extent = extents.get(dim) or Extent(torch.arange(length), length)
            flat = flat[..., None] * extent.whole + extent.places.to(device)
        return flat

    def _extents(self, inner: Sequence[int]) -> Iterator[tuple[int, Extent]]:
        if inner and inner[0] in self._sequence:
            yield 0, self._sequence[inner[0]]
        inside = next((call.inside for call in reversed(self._calls) if call.inside is not None), None)
        if inside is None:
            return
        if inside.features is not None and len(inner) <= 2 and inner[-1:] == (len(inside.features.places),):
            yield len(inner) - 1, inside.features
        elif inside.heads is not None and len(inner) == 3 and len(inside.heads.places) in inner[:2]:
            yield int(inner[0] != len(inside.heads.places)), inside.heads
        else:
            raise UserCodeError(
                f"the module {self._calls[-1].module} drops from a tensor of {list(inner)} a sample between split "
                "layers, and which part of the whole sample that is cannot be known: drop behind the row layer, or set "
                "layout.tensor = 1"
            )


_DRAW_NOTHING = frozenset({
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax,
    nn.AvgPool1d, nn.AvgPool2d, nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
})  # fmt: skip


def draws_nothing(model: nn.Module) -> bool:
    """Is `model` made of modules alone that draw nothing, or whose draws are keyed: PyTorch's and Shoal's? A class of a
    user's, whatever it does, is none of them.
    """
    return all(type(m) in _DRAW_NOTHING or type(m).__module__.startswith("shoal.models.") for m in model.modules())


def active_draws() -> KeyedDraws | None:
    """The mode that is entered here."""
    entered = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, KeyedDraws)]
    return entered[-1] if entered else None


def draws_of_a_forward() -> AbstractContextManager[None]:
    """`KeyedDraws.from_the_start` of the mode that is entered here; nothing where none is."""
    mode = active_draws()
    return nullcontext() if mode is None else mode.from_the_start()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _repeated(where: str) -> UserCodeError:
    return UserCodeError(
        f"{where} draws random numbers in a forward that torch.utils.checkpoint repeats, and which of its calls is "
        'repeated cannot be known: set memory.recompute = "full" instead of calling checkpoint, or turn dropout off'
    )


def _scaled_mask(mode: KeyedDraws, x: Tensor, p: float, shape: Sequence[int] | None = None) -> Tensor:
    """1 / (1 - p) where an element stays, else 0."""
    of_samples = not isinstance(x, nn.Parameter)
    drawn = mode.bits_for(x.shape if shape is None else shape, device=x.device, samples=of_samples)
    return (drawn >= math.floor(p * 2**64) - 2**63).to(x.dtype) / (1 - p)


def _dropout(
    mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False,
    train: bool | None = None,
) -> Tensor:  # fmt: skip
    if not (training if train is None else train) or not 0 < p < 1:
        return func(input, p, training if train is None else train)
    mask = _scaled_mask(mode, input, p)
    return input.mul_(mask) if inplace else input * mask


def _channel_dropout(
    mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or not 0 < p < 1:
        return func(input, p, training, inplace)
    mask = _scaled_mask(mode, input, p, (*input.shape[:2], *[1] * (input.ndim - 2)))
    return input.mul_(mask) if inplace else input * mask


def _alpha_dropout(
    mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training or not 0 < p < 1:
        return func(input, p, training, inplace)
    saturated = -1.7580993408473766  # of SELU
    stays = _scaled_mask(mode, input, p) * (1 - p)
    scale = ((1 - p) * (1 + p * saturated**2)) ** -0.5
    out = scale * (input * stays + saturated * (1 - stays)) - scale * p * saturated
    return input.copy_(out) if inplace else out


def _attention(
    mode: KeyedDraws, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
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
    weights = scores.softmax(-1).nan_to_num(0.0) if attn_mask is not None else scores.softmax(-1)
    return (weights * _scaled_mask(mode, weights, dropout_p)).to(value.dtype) @ value


def _recurrent(mode: KeyedDraws, func: Any, *args: Any) -> Any:
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


def _drawn(law: Callable[[Tensor, Any, Any, Any], Tensor]) -> Callable[..., Tensor]:
    """A random function whose result is overwritten, in its own shape and type, by numbers of `law`."""

    def handler(mode: KeyedDraws, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = func(*args, **kwargs)
        if kwargs.get("generator") is not None or not isinstance(out, Tensor):
            return out
        samples = not isinstance(out, nn.Parameter)
        with torch.no_grad():
            drawn = mode.bits_for(out.shape, device=out.device, samples=samples)
            out.copy_(law(drawn, out, args, kwargs))
        return out

    return handler


def _uniform(drawn: Tensor, out: Tensor) -> Tensor:
    return uniform(drawn, torch.zeros_like(drawn), dtype=torch.float64 if out.dtype == torch.float64 else torch.float32)


def _argument(args: Any, kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _uniform_in_place(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    low, high = _argument(args, kwargs, 1, "from", 0.0), _argument(args, kwargs, 2, "to", 1.0)
    return low + (high - low) * _uniform(drawn, out)


def _normal_in_place(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    mean, std = _argument(args, kwargs, 1, "mean", 0.0), _argument(args, kwargs, 2, "std", 1.0)
    return mean + std * normal(drawn, torch.zeros_like(drawn), dtype=torch.float64)


def _normal_of(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    mean, std = _argument(args, kwargs, 0, "mean", 0.0), _argument(args, kwargs, 1, "std", 1.0)
    return mean + std * normal(drawn, torch.zeros_like(drawn), dtype=torch.float64)


def _log_normal(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    mean, std = _argument(args, kwargs, 1, "mean", 1.0), _argument(args, kwargs, 2, "std", 2.0)
    return (mean + std * normal(drawn, torch.zeros_like(drawn), dtype=torch.float64)).exp()


def _cauchy(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    median, sigma = _argument(args, kwargs, 1, "median", 0.0), _argument(args, kwargs, 2, "sigma", 1.0)
    return median + sigma * (math.pi * (_uniform(drawn, out).double() - 0.5)).tan()


def _geometric(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    failing = 1 - torch.as_tensor(_argument(args, kwargs, 1, "p", 0.5), dtype=torch.float64)
    return (_uniform(drawn, out).double().log() / failing.log()).ceil().clamp(min=1)


def _integers_in_place(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    """`x.random_(to)`, `x.random_(from, to)`, or `x.random_()`, which goes as far as the type counts exactly."""
    bounds = [bound for bound in (*args[1:], kwargs.get("from"), kwargs.get("to")) if bound is not None]
    low = bounds[0] if len(bounds) > 1 else 0
    high = bounds[-1] if bounds else _count_limit(out.dtype)
    return low + (drawn >> 1).remainder(high - low)


def _count_limit(dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return 2 if dtype == torch.bool else min(torch.iinfo(dtype).max + 1, 2**63 - 1)


def _normal(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    return normal(drawn, torch.zeros_like(drawn), dtype=torch.float64)


def _bernoulli(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    p = _argument(args, kwargs, 1, "p", None)
    return _uniform(drawn, out) < (args[0] if p is None else p)


def _bernoulli_in_place(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    return _uniform(drawn, out) < _argument(args, kwargs, 1, "p", 0.5)


def _exponential(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    return -_uniform(drawn, out).log() / _argument(args, kwargs, 1, "lambd", 1.0)


def _integers(drawn: Tensor, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    numbers = [x for x in args if isinstance(x, int)]
    low = kwargs.get("low", numbers[0] if len(numbers) > 1 else 0)
    high = kwargs.get("high", numbers[-1] if numbers else 1)
    return low + (drawn >> 1).remainder(high - low)


def _generator_draw(mode: KeyedDraws, func: Any, *args: Any, **kwargs: Any) -> Any:
    mode.unkeyed.add(func.__name__)
    return func(*args, **kwargs)


def _body(function: Any) -> Any:
    """A function of Python without the check by which it hands itself to a mode: what it calls meets the mode."""
    never = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    copied = types.FunctionType(
        function.__code__, {**function.__globals__, **never}, function.__name__, function.__defaults__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_BODIES: Mapping[Any, Any] = types.MappingProxyType(
    {function: _body(function) for function in (F.multi_head_attention_forward, F.gumbel_softmax)}
)

_DROPPING = frozenset({_dropout, _channel_dropout, _alpha_dropout, _attention, _recurrent})
"""Handlers that take nothing from the generator but what they drop."""

_HANDLERS: Mapping[Any, Any] = types.MappingProxyType(
    {
        **dict.fromkeys((F.dropout, torch.dropout, torch.dropout_), _dropout),
        **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), _channel_dropout),
        **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
        **dict.fromkeys(_BODIES, _dropout),
        **dict.fromkeys((torch.rand, torch.rand_like), _drawn(lambda drawn, out, args, kwargs: _uniform(drawn, out))),
        **dict.fromkeys((torch.randn, torch.randn_like), _drawn(_normal)),
        **dict.fromkeys((torch.randperm, torch.multinomial, Tensor.multinomial, torch.poisson), _generator_draw),
        **dict.fromkeys((F.feature_alpha_dropout, torch.rrelu, F.rrelu), _generator_draw),
        F.alpha_dropout: _alpha_dropout,
        F.scaled_dot_product_attention: _attention,
        **dict.fromkeys((torch.randint, torch.randint_like), _drawn(_integers)),
        torch.bernoulli: _drawn(_bernoulli),
        Tensor.bernoulli_: _drawn(_bernoulli_in_place),
        Tensor.uniform_: _drawn(_uniform_in_place),
        Tensor.normal_: _drawn(_normal_in_place),
        Tensor.exponential_: _drawn(_exponential),
        Tensor.random_: _drawn(_integers_in_place),
        Tensor.cauchy_: _drawn(_cauchy),
        Tensor.log_normal_: _drawn(_log_normal),
        Tensor.geometric_: _drawn(_geometric),
        torch.normal: _drawn(_normal_of),
    }
)
