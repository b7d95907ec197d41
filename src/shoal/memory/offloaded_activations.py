"""What blocks save for their backward, moved to the host meanwhile, or kept there or here in 8 bits.

    forward of block i     its storages leave for the host, each once, while later blocks compute
    backward of block i    they are back; those of block i - 1 are on their way

The hooks of autograd (`saved_tensors_hooks`) see what a block saves whatever it is made of, and so no roles need to be
declared. A recomputed block saves its inputs alone; under pipelines, each microbatch in flight has its own. Moved bytes
are exact. In 8 bits they are not: numbers in blocks of 256 are multiples of 1/127 of the largest of their block, so
that each is off by at most 1/254 of that (GACT, arXiv:2206.11357); gradients are then those of nearby activations.

Parameters and buffers stay, and so does what is small: scales of norms, log-sum-exps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.errors import UserCodeError
from shoal.memory.spill_file import Traffic
from shoal.memory.tiers import HostTier, Image, Lane, exposed

LEAST_BYTES = 32 << 10
LEAST_SHARE = 1 / 8
"""Of the block's largest input: what is smaller stays as it is."""
CODE_BLOCK = 256
HIDDEN = -128
"""The code of what a mask hides; those of numbers end at -127."""
INFINITE = 127
"""The code of plus infinity, in a block that has it."""


@dataclass
class SavedTensors:
    """How blocks save. `to_host`: on the host; `bits` 8: as codes; both."""

    device: torch.device
    traffic: Traffic
    to_host: bool
    bits: int | None = None

    def __post_init__(self) -> None:
        self._tier = HostTier(self.device, self.traffic)
        self._out, self._in = Lane(self.device, "activations-out"), Lane(self.device, "activations-in")
        self._images: dict[int, list[Image]] = {}
        self._newest: weakref.ref[_Call] | None = None
        self.used = False
        """Whether anything was moved or coded so far."""

    def __deepcopy__(self, memo: Any) -> SavedTensors:
        """A copied module saves where its original does."""
        return self

    def use_in(self, blocks: Iterable[nn.Module]) -> None:
        """Has each of `blocks` save by it. Call it after what replaces modules or their forwards."""
        for block in blocks:
            block.forward = _Saving(block, block.forward, self)

    def call(self, apart: set[int], least_bytes: float) -> _Call:
        """The next call of a block."""
        before = None if self._newest is None else self._newest()
        call = _Call(self, apart, least_bytes, None if before is None else weakref.ref(before))
        self._newest = weakref.ref(call)
        return call

    def image(self, source: Tensor) -> Image:
        """A new one, or one that is free again."""
        free = self._images.get(source.nbytes)
        return free.pop() if free else self._tier.image([source])

    def free(self, image: Image) -> None:
        """Nobody needs it any more."""
        self._images.setdefault(image.size_bytes, []).append(image)

    def begin_out(self, image: Image, source: Tensor) -> Future[None]:
        """Begins to move `source` to the host."""
        self.used = True
        return self._out.submit(partial(self._tier.keep, image, [source]))

    def begin_in(self, image: Image, target: Tensor) -> Future[None]:
        """Begins to bring it back."""
        return self._in.submit(partial(self._tier.fetch, image, [target]))

    def close(self) -> None:
        """Ends its threads."""
        self._out.close()
        self._in.close()


@dataclass(frozen=True)
class _Saving:
    """The `forward` of one block, under the hooks; copied with the module."""

    module: nn.Module
    inner: Callable[..., Any]
    saved: SavedTensors

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*inputs, **named)
        own = [*self.module.parameters(), *self.module.buffers()]
        least = max((x.nbytes for x in inputs if isinstance(x, Tensor)), default=0) * LEAST_SHARE
        call = self.saved.call({x.untyped_storage()._cdata for x in own}, max(LEAST_BYTES, least))
        try:
            with saved_tensors_hooks(call.pack, _unpack):
                return self.inner(*inputs, **named)
        finally:
            call.end()


@dataclass(eq=False)
class _Call:
    """One call of a block. What several operators save is stored once, and stays here until the next call has ended.

    `apart` are storages that are not the block's to move; what is smaller than `least_bytes` stays too.
    """

    saved: SavedTensors
    apart: set[int]
    least_bytes: float
    before: weakref.ref[_Call] | None
    stored: weakref.WeakValueDictionary[int, _Stored] = field(default_factory=weakref.WeakValueDictionary)
    coded: dict[tuple[Any, ...], tuple[Tensor, _Coded]] = field(default_factory=dict)
    """With what was coded, so that no other tensor takes its place in memory meanwhile."""

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        stays = storage._cdata in self.apart or tensor.nbytes < self.least_bytes
        if stays or tensor.device.type != self.saved.device.type or type(tensor) is not Tensor:
            return tensor
        if self.saved.bits is not None and tensor.is_floating_point():
            return self._code(tensor.detach())
        return self._store(tensor) if self.saved.to_host else tensor

    def end(self) -> None:
        """The block is over: what the one before has stored leaves the device."""
        self.coded.clear()
        before = None if self.before is None else self.before()
        if before is not None:
            with exposed(self.saved.traffic):
                for stored in list(before.stored.values()):
                    stored.leave()

    def begin(self) -> None:
        """Begins to bring back what will be used."""
        for stored in list(self.stored.values()):
            stored.begin()

    def _store(self, tensor: Tensor) -> _Packed:
        key = tensor.untyped_storage()._cdata
        stored = self.stored.get(key)
        if stored is None:
            stored = self.stored[key] = _Stored(self, _whole_storage(tensor), tensor._version)
        stored.uses += 1
        return _Packed(stored, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _code(self, tensor: Tensor) -> _Coded:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self.coded:
            self.saved.used = True
            codes, scales, lowest = encoded(tensor)
            kept = self._store(codes) if self.saved.to_host else codes
            self.coded[key] = tensor, _Coded(kept, scales, lowest, tensor.dtype)
        elif isinstance(kept := self.coded[key][1].codes, _Packed):
            kept.stored.uses += 1
        return self.coded[key][1]


class _Stored:
    """A storage that a call has saved. `uses`: as many saved tensors lie in it."""

    def __init__(self, call: _Call, source: Tensor, version: int) -> None:
        self._call, self._saved, self._version, self.size_bytes = call, call.saved, version, source.nbytes
        self._source: Tensor | None = source
        self._image = self._saved.image(source)
        self._going = self._saved.begin_out(self._image, source)
        self._coming: tuple[Tensor, Future[None]] | None = None
        self._back: Callable[[], Tensor | None] = _gone
        self.uses = 0

    def leave(self) -> None:
        """Waits until it is on the host, and lets it go from the device."""
        self._going.result()
        self._let_go()

    def begin(self) -> None:
        """Begins to bring it back, unless it is here or all that was saved of it has been used."""
        if self._source is None and self._coming is None and self._back() is None and self.uses > 0:
            self._bring()

    def memory(self) -> Tensor:
        """Its bytes on the device. The rest of its call's sets out as well, and what the call before has stored."""
        back = self._back() if self._source is None else self._source
        if back is None:
            if self._coming is None:
                self._bring()
            assert self._coming is not None
            back, move = self._coming
            with exposed(self._saved.traffic):
                move.result()
        before = None if self._call.before is None else self._call.before()
        for call in (self._call, *([] if before is None else [before])):
            call.begin()
        self._back = weakref.ref(back)
        self.uses -= 1
        if self.uses <= 0:
            self._coming = None
            self._let_go()
        return back

    def _bring(self) -> None:
        self._going.result()
        target = torch.empty(self.size_bytes, dtype=torch.uint8, device=self._saved.device)
        self._coming = target, self._saved.begin_in(self._image, target)

    def _let_go(self) -> None:
        if self._source is not None and self._source._version != self._version:
            raise UserCodeError(
                "a block changes in place what it has saved for its backward (an in-place activation, most often): "
                'use the form that is not in place, or set memory.offload.activations = "device"'
            )
        self._source = None

    def __del__(self) -> None:
        if self._going.done() and (self._coming is None or self._coming[1].done()):
            self._saved.free(self._image)


@dataclass(frozen=True)
class _Packed:
    """A tensor in a stored storage."""

    stored: _Stored
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.stored.memory().view(self.dtype).as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Coded:
    """A tensor in 8 bits."""

    codes: Tensor | _Packed
    scales: Tensor
    lowest: Tensor
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        codes = self.codes if isinstance(self.codes, Tensor) else self.codes.tensor()
        return decoded(codes, self.scales, self.lowest, self.dtype)


def encoded(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of the shape of `x`, int8, a float32 scale for each `CODE_BLOCK` of its numbers in order, and the lowest.

    What masks write where nothing may be seen, minus infinity or the lowest number of the type, has the code `HIDDEN`
    and is left out of the scale, which would leave nothing of its neighbours. So has what is within 1/254 of that
    number: a bias may have been added to it. A block with plus infinity has a negative scale, in which the largest code
    is infinity and numbers end at 126. A NaN makes NaN of its block.
    """
    flat = x.reshape(-1).float()
    hidden = flat <= torch.finfo(x.dtype).min * (1 - 1 / 254)
    seen = nn.functional.pad(flat.masked_fill(hidden, 0.0), (0, -flat.numel() % CODE_BLOCK)).view(-1, CODE_BLOCK)
    infinite = seen == torch.inf
    ends = torch.where(infinite.any(1, keepdim=True), -126, 127)
    seen = seen.masked_fill(infinite, 0.0)
    sizes = (seen.abs().amax(1, keepdim=True) / ends.abs()).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = (seen / sizes).round_().to(torch.int8).masked_fill_(infinite, INFINITE)
    codes = codes.view(-1)[: flat.numel()].masked_fill(hidden, HIDDEN)
    return codes.view(x.shape), sizes * ends.sign(), flat.amin()


def decoded(codes: Tensor, scales: Tensor, lowest: Tensor, dtype: torch.dtype) -> Tensor:
    """What `encoded` kept: each number is off by at most 1/254 of the largest of its block (1/252 in a block with
    infinity). What masks hide is the lowest of all: minus infinity where there is any.
    """
    flat = codes.reshape(-1)
    blocks = nn.functional.pad(flat, (0, -flat.numel() % CODE_BLOCK)).view(-1, CODE_BLOCK)
    numbers = (blocks * scales.abs()).masked_fill_((scales < 0) & (blocks == INFINITE), torch.inf)
    seen = numbers.view(-1)[: flat.numel()]
    return torch.where(flat == HIDDEN, lowest, seen).view(codes.shape).to(dtype)


def _unpack(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.tensor()


def _whole_storage(tensor: Tensor) -> Tensor:
    """All bytes of its storage. Its version counts changes of `tensor` too."""
    numbers = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.detach().as_strided((numbers,), (1,), 0).view(torch.uint8)


def _gone() -> Tensor | None:
    return None
