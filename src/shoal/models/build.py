"""From a `[model]` table to the module (`build`, under `torch.device("meta")`), and first values of its parameters.

First values of a model: every number a pure function of (seed, parameter's name, its index in the whole parameter).

Neither the layout nor the order of the draws has a part in it. A rank that holds a box of a parameter draws that box
alone (`draw`) and gets, bit for bit, the slice that a single process would hold.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shoal.config.check import implementation_of
from shoal.errors import UserCodeError
from shoal.maths.counter import indices, key_of
from shoal.models.config import BuiltInModel
from shoal.models.roles import Law, roles_of

# Draws of this many numbers at a time stay in the cache and bound the memory that int64 and float64 steps take.
BLOCK_NUMEL = 1 << 16


def build(config: BuiltInModel) -> nn.Module:
    """One of Shoal's own models, on the current default device."""
    return implementation_of(config)(config)


def parameter_count(module: nn.Module) -> int:
    """Numbers in the module's parameters, a tied parameter counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


@runtime_checkable
class ResetsBuffers(Protocol):
    """A module that can compute its own buffers anew."""

    def reset_buffers(self) -> None:
        """Writes the first values into the module's own buffers, in place."""
        ...


@torch.no_grad()
def initialise(model: nn.Module, *, seed: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
    """Gives `model`, typically built on the meta device, storage and first values, in place; ties stay tied.

    Floating parameters become `dtype`; floating buffers are widened to it but never narrowed.
    Raises `UserCodeError` for a parameter without a declared first value, or a meta buffer nobody can compute.
    """
    laws = laws_of(model)
    parts = {n: PartOf(n, tuple(p.shape), (0,) * p.ndim, laws[n]) for n, p in model.named_parameters()}
    initialise_parts(model, parts, seed=seed, device=device, dtype=dtype)


@dataclass(frozen=True)
class PartOf:
    """What a parameter is of the unsplit model: it begins at `offset` of the one called `name`, drawn by `law`."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    law: Law


@torch.no_grad()
def initialise_parts(
    model: nn.Module,
    parts: Mapping[str, PartOf],
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    apart: Collection[str] = (),
) -> None:
    """`initialise` for a model of which this rank holds `parts`, by the names that its parameters have here. Others
    get storage, and no values; those in `apart` neither.
    """
    place_parameters(model, torch.device(device), dtype, apart=apart)
    _place_buffers(model, torch.device(device), dtype)
    for name, parameter in model.named_parameters():
        part = parts.get(name)
        if part is None:
            continue
        _fill(parameter, part.law, key=key_of(seed, part.name), global_shape=part.global_shape, offsets=part.offset)


def draw(
    law: Law,
    name: str,
    *,
    seed: int,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The first values of the box of `shape` at `offsets` of the parameter `name`, whose whole is `global_shape`.

    Raises `ValueError` where the box is not inside.
    """
    box = torch.empty(tuple(shape), dtype=dtype, device=device)
    draw_into(box, law, name, seed=seed, global_shape=global_shape, offsets=offsets)
    return box


def draw_into(
    box: Tensor, law: Law, name: str, *, seed: int, global_shape: Sequence[int], offsets: Sequence[int]
) -> None:
    """`draw`, written to `box`."""
    _fill(box, law, key=key_of(seed, name), global_shape=global_shape, offsets=offsets)


def laws_of(model: nn.Module) -> dict[str, Law]:
    """How each parameter of an unsplit model is drawn. Raises `UserCodeError` for one that does not say."""
    laws: dict[str, Law] = {}
    for name, role in roles_of(model).items():
        if role.init is None:
            raise UserCodeError(
                f"the parameter '{name}' of {type(model).__name__} has no declared first values, so they cannot be "
                f"drawn; declare them in parameter_roles(), or build the module with its values instead"
            )
        laws[name] = role.init
    return laws


def _fill(box: Tensor, law: Law, *, key: int, global_shape: Sequence[int], offsets: Sequence[int]) -> None:
    """Draws `box`, which lies at `offsets` in the whole, in place and block by block."""
    for rows, row_offsets in _row_blocks(box, offsets):
        counters = indices(global_shape, row_offsets, rows.shape, device=box.device)
        rows.copy_(law.draw(key, counters, dtype=box.dtype))


def _row_blocks(box: Tensor, offsets: Sequence[int]) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Views of `box` cut along the first dimension into about `BLOCK_NUMEL` numbers, and where each begins."""
    if box.ndim == 0:
        yield box, offsets
        return
    rows_each = max(1, BLOCK_NUMEL // max(1, math.prod(box.shape[1:])))
    for block, rows in enumerate(box.split(rows_each)):
        yield rows, [offsets[0] + block * rows_each, *offsets[1:]]


def place_parameters(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    *,
    apart: Collection[str] = (),
    bare_alone: bool = False,
) -> None:
    """Replaces every parameter by an empty one on `device`; a parameter with several owners is replaced by one.

    Those in `apart` get one number of storage, NaN, for all of theirs. `bare_alone`: those on the meta device alone,
    which stay the same objects, as code of a user's may hold them elsewhere than in a module.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if bare_alone and not old.is_meta:
                continue
            if old not in placed:
                kind = dtype if old.is_floating_point() else old.dtype
                new = _without_numbers(old.shape, kind, device, names[id(old)] in apart)
                placed[old] = nn.Parameter(new, requires_grad=old.requires_grad)
            if bare_alone:
                torch.utils.swap_tensors(old, placed[old])
            else:
                setattr(module, name, placed[old])


def _without_numbers(shape: torch.Size, dtype: torch.dtype, device: torch.device, bare: bool) -> Tensor:
    if bare and dtype.is_floating_point:
        return torch.full((), math.nan, dtype=dtype, device=device).expand(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def _place_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    for path, module in model.named_modules():
        for name, old in list(module.named_buffers(recurse=False)):
            if old.is_meta and not isinstance(module, ResetsBuffers):
                raise UserCodeError(
                    f"the buffer '{path}.{name}' has no value on the meta device; give {type(module).__name__} a "
                    f"method reset_buffers() that computes it, or build it elsewhere"
                )
            wide = torch.promote_types(old.dtype, dtype) if old.is_floating_point() else old.dtype
            empty_or_moved = torch.empty(old.shape, dtype=wide, device=device) if old.is_meta else old.to(device, wide)
            setattr(module, name, empty_or_moved)
        if isinstance(module, ResetsBuffers):
            module.reset_buffers()
