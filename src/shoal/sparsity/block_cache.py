"""A cache of what the frozen blocks at the front of a model return, by sample (`freeze.cache`).

They return the same in every epoch, so for a batch whose samples have all been seen they are not computed. A sample is
known by a hash of what the model is called with: one that is augmented in another way is another sample. Autograd tells
which blocks these are: what they return requires no gradient. Ranks that share a batch fetch cached samples from each
other (`KeptSamples`), because a sample goes to another rank in each epoch.

A wrong gradient that nobody notices would be worse than no cache, so all that it rests on is checked:

- Only the last of these blocks returns what is cached. The others return a `LeftOut`, with which nothing can be
  computed: a model that reads it elsewhere, as a skip connection does, is refused.
- Blocks are refused that drop features, take statistics of a batch, add to the loss, or change a buffer, and so is
  what draws a number before the last of them.
- The first batch that the cache has is computed all the same and compared, and so is the first whose samples came in
  different batches before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from shoal import units
from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.models.batch_norm import StepStatistics
from shoal.models.draw_watch import DrawWatch
from shoal.models.keyed_draws import active_draws
from shoal.models.layers import KeyedDropout
from shoal.models.router import TakesAuxiliary

SAME_SAMPLE, SAME_ROUNDED = 1e-5, 1e-2
"""How far a sample's features may be from those in another batch, for the largest: in float32, and of 16 bits."""


class LeftOut(Tensor):
    """In place of what a block would give that is not computed. It can be passed on and asked for its shape, dtype and
    device; all else raises `UserCodeError`. Code that is not asked, in C++, finds NaN.
    """

    @classmethod
    def of(cls, like: Tensor) -> Tensor:
        """One of the shape of `like`, on its device."""
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        nan = torch.full((), torch.nan, dtype=dtype, device=like.device)
        return nan.expand(like.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        raise UserCodeError(
            f"freeze.cache: the model computes ({name}) with what a frozen block gives that is not the last of them, "
            "as a skip connection does, and only that of the last is kept; leave cache out"
        )


_ASKED = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.is_floating_point, torch.is_floating_point),
}


@dataclass
class _Forward:
    """One of a batch in training. `leaves_out`: blocks are not computed, for what they give was `found`, on the host.

    `given`: the last block so far whose result requires no gradient, and that; `drew`: something was drawn until then.
    """

    keys: tuple[bytes, ...]
    found: Tensor | None
    leaves_out: bool
    buffers: list[tuple[int, int]]
    keyed: int
    watch: DrawWatch = field(default_factory=DrawWatch)
    given: tuple[int, Tensor] | None = None
    called: set[int] = field(default_factory=set)
    drew: bool = False


KEY_BYTES = 16
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
FORM = 9
"""Numbers that say what is kept for a sample: which of `DTYPES`, and the sizes of its dims, each plus 1; then zeros."""


class KeptSamples:
    """What was given for samples, on the host, by their keys; of each rank `budget_bytes` at most.

    A rank keeps what it has computed and nobody kept, and finds what any rank of `group` keeps: keys go round before
    every forward, and for a batch that is found whole the first rank that has a sample sends it. Messages are on
    `device`. What a full rank computes is computed again whenever it comes.
    """

    def __init__(self, budget_bytes: int, group: Collective, device: torch.device) -> None:
        self._budget_bytes, self._held_bytes = budget_bytes, 0
        self._group, self._device = group, device
        self._rows: dict[bytes, Tensor] = {}
        self._anywhere: set[bytes] = set()
        """Of the keys that were asked for last, those that somebody keeps."""
        self._lines: list[str] = []
        self._full = False

    def find(self, keys: Sequence[bytes]) -> Tensor | None:
        """`[samples, ...]`; None where there is no sample, or one that nobody keeps. All ranks call it together."""
        if self._group.size > 1:
            return self._find_anywhere(keys)
        found = [self._rows[key] for key in keys if key in self._rows]
        return torch.stack(found) if found and len(found) == len(keys) else None

    def keep(self, keys: Sequence[bytes], given: Tensor) -> bool:
        """`given` `[samples, ...]`, after `find` of the same keys. Whether all of them are kept now, by any rank.

        Raises `UserCodeError` where there is no room for one of them, or ranks could not send it.
        """
        if self._group.size > 1:
            _check_form(given)
        for key, row in zip(keys, given, strict=True):
            if key not in self._rows and key not in self._anywhere:
                self._keep(key, row)
        return all(key in self._rows or key in self._anywhere for key in keys)

    def take_lines(self) -> list[str]:
        """What is to be said since it was asked last: that there is no more room."""
        lines, self._lines = self._lines, []
        return lines

    def _keep(self, key: bytes, row: Tensor) -> None:
        if row.nbytes > self._budget_bytes:
            raise UserCodeError(
                f"freeze.cache: a sample of {row.nbytes:,} bytes is more than it may hold: give it what all samples of "
                "a rank take, or leave it out"
            )
        if self._held_bytes + row.nbytes <= self._budget_bytes:
            self._rows[key] = row.clone()
            self._held_bytes += row.nbytes
        elif not self._full:
            self._full = True
            self._lines.append(
                f"freeze.cache is full with {units.plural(len(self._rows), 'sample')} of {row.nbytes:,} bytes on this "
                "rank, and there are others, whose batches are computed each time: give it what all samples of a rank "
                "take, or leave it out"
            )

    def _find_anywhere(self, keys: Sequence[bytes]) -> Tensor | None:
        asked, self._anywhere = self._asked(keys), set()
        if not any(asked):
            return None
        known = {key: self._rows[key] for own in asked for key in own if key in self._rows}
        forms = torch.tensor([_form_of(known.get(key)) for own in asked for key in own])
        by_rank = self._gathered(forms.flatten()).view(self._group.size, -1, FORM)
        form_of = iter(by_rank.amax(0).tolist())  # those who keep a sample agree on its form
        first_of = iter((by_rank[..., 0] > 0).to(torch.uint8).argmax(0).tolist())
        wanted = []
        for rank, own in enumerate(asked):
            each = [(key, next(first_of), next(form_of)) for key in own]
            wanted.append(each if all(form[0] for _, _, form in each) else [])
            if rank == self._group.rank:
                self._anywhere = {key for key, _, form in each if form[0]}
        return self._fetch(wanted) if any(wanted) else None

    def _fetch(self, wanted: Sequence[Sequence[tuple[bytes, int, list[int]]]]) -> Tensor | None:
        """What this rank wants of (key, who sends it, its form), as each rank does."""
        me, ranks = self._group.rank, range(self._group.size)
        sent = [[_bytes_of(self._rows[key]) for key, holder, _ in each if holder == me] for each in wanted]
        sizes = [sum(_bytes_in(form) for _, holder, form in wanted[me] if holder == rank) for rank in ranks]
        got = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        out = torch.cat([torch.empty(0, dtype=torch.uint8), *(row for rows in sent for row in rows)]).to(self._device)
        given = [sum(map(len, rows)) for rows in sent]
        self._group.all_to_all(got, out, output_sizes=sizes, input_sizes=given).wait()
        unread = list(got.cpu().split(sizes))
        rows = []
        for _, holder, form in wanted[me]:
            row, unread[holder] = unread[holder].tensor_split([_bytes_in(form)])
            rows.append(_row_of(row, form))
        return torch.stack(rows) if rows else None

    def _asked(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        """The keys of every rank."""
        lengths = self._gathered(torch.tensor([len(keys)])).tolist()
        padded = torch.zeros(max(lengths), KEY_BYTES, dtype=torch.uint8)
        if keys:
            padded[: len(keys)] = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, KEY_BYTES)
        whole = self._gathered(padded.flatten()).view(self._group.size, -1, KEY_BYTES).numpy()
        return [[row.tobytes() for row in own[:length]] for own, length in zip(whole, lengths, strict=True)]

    def _gathered(self, own: Tensor) -> Tensor:
        """Every rank's numbers, one behind the other."""
        found = torch.empty(self._group.size * own.numel(), dtype=own.dtype, device=self._device)
        self._group.all_gather(found, own.to(self._device)).wait()
        return found.cpu()


def _check_form(given: Tensor) -> None:
    if given.dtype not in DTYPES or given.ndim > FORM:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UserCodeError(
            f"freeze.cache: the last frozen block gives {str(given.dtype).removeprefix('torch.')} of {given.ndim} "
            f"dims, and ranks send each other samples of {FORM - 1} dims at most, of {known}: leave cache out"
        )


def _form_of(row: Tensor | None) -> list[int]:
    if row is None:
        return [0] * FORM
    return [1 + DTYPES.index(row.dtype), *(1 + size for size in row.shape), *[0] * (FORM - 1 - row.ndim)]


def _sizes(form: Sequence[int]) -> list[int]:
    return [size - 1 for size in form[1:] if size]


def _bytes_of(row: Tensor) -> Tensor:
    return row.contiguous().view(-1).view(torch.uint8)


def _bytes_in(form: Sequence[int]) -> int:
    return DTYPES[form[0] - 1].itemsize * math.prod(_sizes(form))


def _row_of(numbers: Tensor, form: Sequence[int]) -> Tensor:
    return numbers.clone().view(DTYPES[form[0] - 1]).view(_sizes(form))


class CachedBlocks:
    """What the last of the frozen `blocks` gives, by sample, `kept` from the epoch before.

    It replaces the `forward` of each block. Raises `UserCodeError` in a forward of `model` where one of the checks
    above fails, where there are no frozen blocks at the front, or a sample that cannot be kept.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], kept: KeptSamples) -> None:
        self._model, self._blocks, self._kept = model, list(blocks), kept
        self._batches: set[tuple[bytes, ...]] = set()
        """Those that were computed, and whose samples are all kept: no more than there are samples here."""
        self._checked: set[bool] = set()
        """Whether batches that were computed before are known to give the same, and whether others are."""
        self._last: int | None = None
        self._device = torch.device("cpu")
        self._front: list[tuple[str, nn.Module]] = []
        self._now: _Forward | None = None
        self._seen, self._left_out = 0, 0
        for number, block in enumerate(blocks):
            block.forward = partial(self._block, number, block.forward)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)

    def take_figures(self) -> dict[str, float]:
        """`freeze/left_out`: the share of this rank's samples, since it was asked last, that no block computed."""
        share = self._left_out / max(1, self._seen)
        self._seen, self._left_out = 0, 0
        return {"freeze/left_out": share}

    def take_lines(self) -> list[str]:
        """What is to be said of the steps since it was asked last."""
        return self._kept.take_lines()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._now = None
        if not (model.training and torch.is_grad_enabled()):
            return
        keys = tuple(keys_of_samples(tree_leaves((args, named))))
        found = self._kept.find(keys)
        if not keys:
            return
        leaves_out = found is not None and (keys in self._batches) in self._checked
        self._now = _Forward(keys, found, leaves_out, self._buffers(), _keyed_draws())
        self._seen += len(keys)
        self._left_out += len(keys) if leaves_out else 0

    def _block(self, number: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        now = self._now
        if now is None or self._last is None or not now.leaves_out or number > self._last:
            given = forward(*args, **named)
            if now is not None:
                self._saw(now, number, given)
            return given
        assert now.found is not None, "else it would not be left out"
        if number == self._last:
            return now.found.to(self._device)
        hidden = next((x for x in tree_leaves((args, named)) if isinstance(x, Tensor)), now.found)
        return LeftOut.of(hidden)

    def _saw(self, now: _Forward, number: int, given: Any) -> None:
        if now.leaves_out or not isinstance(given, Tensor) or given.requires_grad or not torch.is_grad_enabled():
            return
        if number in now.called:
            raise UserCodeError(f"freeze.cache: block {number} is called more than once in a forward; leave cache out")
        now.called.add(number)
        now.given = number, given
        now.drew = now.watch.drew() or _keyed_draws() != now.keyed

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        now, self._now = self._now, None
        if now is None or now.leaves_out:
            return
        given = self._given(now)
        self._check_state(now)
        if now.found is not None:
            self._check_same(now, given)
            self._checked.add(now.keys in self._batches)
        if self._kept.keep(now.keys, given):
            self._batches.add(now.keys)

    def _given(self, now: _Forward) -> Tensor:
        """What the last frozen block gave, on the host."""
        name = type(self._model).__name__
        if now.given is None:
            raise UserCodeError(
                f"freeze.cache: {name} has no frozen blocks at its front that give one tensor; name all that comes "
                "before the trained blocks in freeze.layers, or leave cache out"
            )
        last, given = now.given
        if len(given) != len(now.keys):
            raise UserCodeError(
                f"freeze.cache: block {last} of {name} gives {list(given.shape)} for {len(now.keys)} samples: its "
                "first dim has to count samples; leave cache out"
            )
        if self._last is None:
            self._last, self._device = last, given.device
            self._front = self._up_to(self._blocks[last])
            self._check_modules()
        if last != self._last:
            raise UserCodeError(
                f"freeze.cache: the last frozen block of {name} is {last}, and was {self._last} before; leave cache out"
            )
        return given.detach().cpu()

    def _up_to(self, last: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules of the model from the first one to those of the block `last`."""
        inside, every = set(last.modules()), list(self._model.named_modules())
        return every[: 1 + max(number for number, (_, module) in enumerate(every) if module in inside)]

    def _check_modules(self) -> None:
        assert self._last is not None, "a block has given something"
        for name, module in self._front:
            if (why := _why_not(module)) is not None:
                raise UserCodeError(f"freeze.cache: {name} ({type(module).__name__}) {why}, or leave cache out")
        for number, block in enumerate(self._blocks[: self._last + 1]):
            if any(parameter.requires_grad for parameter in block.parameters()):
                raise UserCodeError(
                    f"freeze.cache: block {number} has trained parameters before the last frozen block; name it in "
                    "freeze.layers, or leave cache out"
                )

    def _buffers(self) -> list[tuple[int, int]]:
        """Which tensors they are, and how often they were written to."""
        own = (buffer for _, module in self._front for buffer in module.buffers(recurse=False))
        return [(id(buffer), buffer._version) for buffer in own]

    def _check_state(self, now: _Forward) -> None:
        if now.drew:
            raise UserCodeError(
                "freeze.cache: numbers are drawn before the last frozen block, as dropout and stochastic depth do; "
                "turn them off there, or leave cache out"
            )
        if now.buffers and now.buffers != self._buffers():
            raise UserCodeError(
                "freeze.cache: the forward changes a buffer of the frozen blocks, as running statistics are; call "
                "eval() on what has it, or leave cache out"
            )

    def _check_same(self, now: _Forward, given: Tensor) -> None:
        assert now.found is not None, "there is something to compare"
        short = given.dtype.itemsize == 2 or torch.is_autocast_enabled(self._device.type)
        share = SAME_ROUNDED if short else SAME_SAMPLE
        if not torch.allclose(now.found, given, rtol=share, atol=share * float(given.abs().max())):
            raise UserCodeError(
                "freeze.cache: frozen blocks gave something else for the same samples than before: what they give has "
                "to depend on the sample alone; leave cache out"
            )


def _why_not(module: nn.Module) -> str | None:
    """Why the result of a block with `module` cannot be kept, and what to do; None where it can."""
    if isinstance(module, TakesAuxiliary):
        return "adds to the loss: use a model without mixtures"
    if not module.training:
        return None
    if isinstance(module, KeyedDropout | _DropoutNd) and module.p > 0:
        return f"drops features (p = {module.p}): set it to 0"
    if isinstance(module, StepStatistics | _BatchNorm):
        return "takes statistics of a batch: call eval() on it"
    return None


def _keyed_draws() -> int:
    """How often something was drawn under the mode that is entered here."""
    draws = active_draws()
    return 0 if draws is None else draws.drew


def keys_of_samples(inputs: Sequence[Any]) -> list[bytes]:
    """A hash of what each sample has of `inputs`: the first dim of the first tensor counts samples; tensors of another
    length, numbers and strings are every sample's. Without tensors, none.
    """
    own = [x.detach().cpu().contiguous() for x in inputs if isinstance(x, Tensor)]
    samples = len(own[0]) if own and own[0].ndim else 0
    shared = [x for x in own if not x.ndim or len(x) != samples]
    plain = repr([x for x in inputs if isinstance(x, bool | int | float | str)]).encode()
    keys = []
    for number in range(samples):
        digest = hashlib.blake2b(plain, digest_size=KEY_BYTES)
        for part in [*(x[number] for x in own if x.ndim and len(x) == samples), *shared]:
            digest.update(str((part.dtype, tuple(part.shape))).encode())
            digest.update(part.reshape(-1).view(torch.uint8).numpy().tobytes())
        keys.append(digest.digest())
    return keys
