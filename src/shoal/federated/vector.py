"""A model as one flat vector, and what a change of it is on its way. Strategies, masks and frames see vectors alone.

A `VectorLayout` says which parameter lies where. An `Upload` sends a change as it is, or as a codec's payload with
error feedback at the client:

    y = decode(encode(delta + e)),   e <- delta + e - y

e, the residual, is what the client has not sent yet (Karimireddy et al., arXiv:1901.09847). Both ends draw the codec's
random numbers from the same key, which follows from the run's seed, the client and the version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import gt

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.codec.codec import Codec, Payload
from shoal.codec.config import CodecConfig, NoCodec
from shoal.config.check import implementation_of
from shoal.errors import ConfigError, UserCodeError
from shoal.maths.counter import key_of


@dataclass(frozen=True)
class VectorLayout:
    """The trained parameters of a module in its own order, float32 or float64, one behind the other."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers in each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Numbers in all of them."""
        return sum(self.sizes)

    @property
    def fingerprint(self) -> str:
        """Equal where names and shapes are: both ends of a connection compare it."""
        return hashlib.blake2b(repr((self.names, self.shapes)).encode(), digest_size=16).hexdigest()

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters in `vector` [numel], by name."""
        parts = vector.split(self.sizes)
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def mask(self, patterns: Sequence[str], *, key: str) -> Tensor:
        """Where parameters lie whose names fit a pattern, bool [numel]. Raises `ConfigError` for one that fits none."""
        fits = [any(fnmatchcase(name, pattern) for pattern in patterns) for name in self.names]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self.names):
                raise ConfigError(f"{key}: no parameter is called {pattern!r}; there are {', '.join(self.names[:6])}")
        return torch.cat([torch.full((size,), fit) for size, fit in zip(self.sizes, fits, strict=True)])


def layout_of(module: nn.Module) -> VectorLayout:
    """The layout of what `module` trains. Raises `UserCodeError` for batch statistics that clients could not share."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is not None:
            raise UserCodeError(
                f"module {name} ({type(part).__name__}) keeps running statistics, which updates do not carry: use "
                "GroupNorm or LayerNorm, or track_running_stats=False"
            )
    trained = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
    return VectorLayout(tuple(name for name, _ in trained), tuple(shape for _, shape in trained))


def corner_of(whole: VectorLayout, narrow: VectorLayout) -> Tensor:
    """Where the numbers of `narrow` lie in a vector of `whole`, int64: of each parameter the corner at index 0.

    Raises `ConfigError` where it has other parameters, or none so large.
    """
    if narrow.names != whole.names:
        raise ConfigError("the narrower model has other parameters than the whole one: only their sizes may differ")
    places = torch.arange(whole.numel)
    views = whole.views(places).items()
    found = [corner(name, each, shape) for (name, each), shape in zip(views, narrow.shapes, strict=True)]
    return torch.cat([each.reshape(-1) for each in found])


def corner(name: str, whole: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The view of `whole` that begins at index 0 and has `shape`. Raises `ConfigError` where there is none."""
    size = tuple(whole.shape)
    if len(shape) != len(size) or any(map(gt, shape, size)):
        raise ConfigError(f"{name} is {list(shape)} in the narrower model: that is no corner of {list(size)}")
    return whole[tuple(map(slice, shape))]


@torch.no_grad()
def copy_frozen(whole: nn.Module, narrow: nn.Module) -> None:
    """Gives parameters that `narrow` does not train the corners of those of `whole`. Raises `ConfigError` where it has
    none of the name, or none so large.
    """
    theirs = dict(whole.named_parameters())
    for name, own in narrow.named_parameters():
        if own.requires_grad:
            continue
        if name not in theirs:
            raise ConfigError(f"{name} is frozen in the narrower model, and the whole one does not have it")
        own.copy_(corner(name, theirs[name], tuple(own.shape)))


def vector_of(module: nn.Module, layout: VectorLayout) -> Tensor:
    """A copy of the parameters [numel]."""
    parameters = dict(module.named_parameters())
    return torch.cat([parameters[name].detach().reshape(-1) for name in layout.names])


@torch.no_grad()
def write_vector(module: nn.Module, layout: VectorLayout, vector: Tensor) -> None:
    """Gives the module the numbers of `vector`."""
    parameters = dict(module.named_parameters())
    for name, part in layout.views(vector).items():
        parameters[name].copy_(part)


@dataclass(frozen=True)
class Upload:
    """How updates of `numel` numbers are sent. `codec` None: as they are, in `dtype`."""

    numel: int
    dtype: torch.dtype
    codec: Codec | None
    feedback: bool
    seed: int

    def nbytes(self, *, control: bool) -> int:
        """Bytes of the tensors of one update."""
        plain = self.numel * self.dtype.itemsize
        first = plain if self.codec is None else sum(field.nbytes for field in self.codec.fields(self.numel))
        return first + (plain if control else 0)

    def encode(self, delta: Tensor, residual: Tensor | None, *, client: str, version: int) -> Encoded:
        """What is sent for `delta`, what the server makes of it, and what is left over."""
        if self.codec is None:
            return Encoded((delta,), delta, None)
        whole = delta if residual is None else delta + residual
        key = self._key(client, version)
        payload = self.codec.encode(whole, key=key)
        arrives = self.codec.decode(payload, self.numel, key=key, dtype=delta.dtype).to(delta.dtype)
        return Encoded(payload, arrives, whole - arrives if self.feedback else None)

    def decode(self, payload: Payload, *, client: str, version: int) -> Tensor:
        """The change [numel] that a client's payload stands for."""
        if self.codec is None:
            return payload[0]
        key = self._key(client, version)
        return self.codec.decode(payload, self.numel, key=key, dtype=self.dtype).to(self.dtype)

    def fields(self) -> list[tuple[torch.dtype, int]]:
        """Type and length of each tensor of a payload."""
        if self.codec is None:
            return [(self.dtype, self.numel)]
        return [(field.dtype, field.numel) for field in self.codec.fields(self.numel)]

    def _key(self, client: str, version: int) -> int:
        return key_of(self.seed, "upload", client, version)


@dataclass(frozen=True)
class Encoded:
    """`payload`: what is sent; `arrives`: what the server makes of it; `residual`: what is left for the next time."""

    payload: Payload
    arrives: Tensor
    residual: Tensor | None


def upload_of(config: CodecConfig, *, numel: int, dtype: torch.dtype, seed: int) -> Upload:
    """How a run with this table `[codec]` sends updates."""
    codec = None if isinstance(config, NoCodec) else implementation_of(config)(config)
    return Upload(numel, dtype, codec, config.feedback, seed)
