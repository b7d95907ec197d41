"""Loading: a checkpoint read into tensors of any layout, by the intersection of boxes.

First the tensors must be those of the checkpoint: otherwise the first few differences say which model it is, and
nothing is changed. Then objects are mapped one after the other, so that a rank reads the parts of the files that it
needs; of encoded ones it decodes the chunks that it needs, on several threads. Nothing is unpickled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.checkpoint import tensorfile
from shoal.checkpoint.encoding import THREADS, EncodedObject, in_order
from shoal.checkpoint.manifest import BoxEntry, Manifest, TensorEntry
from shoal.checkpoint.objects import Places
from shoal.checkpoint.tensorfile import BY_NAME, dtype_name, family
from shoal.errors import CorruptCheckpoint, OutOfMemory, UsageError
from shoal.state import Held, Target, parts_of
from shoal.topology.holding import Box, intersection

_NAMED = 3
RESUMED = "Set run.directory to a new folder, or go back to the model that wrote it"
"""What to do where a run cannot go on because its directory holds another model."""
MASKS = "sparsity/"
MASKED = (
    "They are masks of other layers: name in sparsity.layers those that the run has begun with, such as "
    '["blocks.*.weight", "head.weight"], for which layers are dense by default differs between versions; or set '
    "run.directory to a new folder"
)


def read_into(
    manifest: Manifest,
    directory: Path,
    tensors: Mapping[str, Held],
    *,
    strict: bool = True,
    cast: bool = False,
    elsewhere: Collection[str] = (),
    repair: str = RESUMED,
) -> list[str]:
    """Fill `tensors` in place from a checkpoint; returns the names it does not hold (none when `strict`).

    A plain tensor is a whole one; of any other the parts are filled. `elsewhere` are names that other ranks fill: the
    checkpoint must hold them too. `repair` says what to do about the checkpoint of another model. Only the families
    ("model/", "optimizer/") that are asked for are compared, so that weights alone can be loaded strictly. Raises
    `UsageError` when names (if `strict`), shapes or element types (unless `cast`) differ, before anything is changed;
    `CorruptCheckpoint` when a file is not what the manifest says.
    """
    parts = parts_of(tensors)
    asked = {*tensors, *elsewhere}
    families = {family(name) for name in asked}
    saved = {entry.name: entry for entry in manifest.tensors if family(entry.name) in families}
    wanted = [(name, _expected(name, target)) for name, targets in parts.items() for target in targets]
    require_match(saved, wanted, asked if strict else None, cast=cast, directory=directory, repair=repair)
    _fill(manifest, Places(directory), parts)
    return [name for name in parts if name not in saved]


def read_all(manifest: Manifest, directory: Path, prefix: str = "") -> dict[str, Tensor]:
    """The whole tensors whose names begin with `prefix`, in memory of their own, under their full names."""
    tensors = {entry.name: empty(entry) for entry in manifest.tensors if entry.name.startswith(prefix)}
    read_into(manifest, directory, tensors, strict=False)
    return tensors


class Expected(NamedTuple):
    """What the model has under a name: the global shape and the element type."""

    shape: tuple[int, ...]
    dtype: str


Wanted = Sequence[tuple[str, Expected]]


def require_match(
    saved: Mapping[str, TensorEntry],
    wanted: Wanted,
    asked: Collection[str] | None,
    *,
    cast: bool,
    directory: Path,
    repair: str,
) -> None:
    """Raise `UsageError` unless `saved` can fill `wanted`, where a name may occur several times.

    `asked` are the names that all ranks together want: others in `saved`, and those missing there, are refused too;
    None does not compare names. `cast` allows other element types. `directory` holds `saved`; `repair` is what to do
    about another model there.
    """
    both = [(name, expected) for name, expected in wanted if name in saved]
    shapes = [_shapes(name, saved[name], want) for name, want in both if tuple(saved[name].shape) != want.shape]
    differences = [_listed("other shapes", shapes)]
    if asked is not None:
        absent, more = sorted(_absent(asked, saved)), sorted(_absent(saved, asked))
        differences += [_listed("missing in it", absent), _listed("only in it", more)]
        if not shapes and all(map(_is_mask, (*absent, *more))) and any(map(_is_mask, saved)):
            repair = MASKED
    if any(differences):
        raise UsageError(f"{directory} holds another model: {'; '.join(filter(None, differences))}. {repair}")
    types = [
        f"{name} is {saved[name].dtype}, not {want.dtype}" for name, want in both if saved[name].dtype != want.dtype
    ]
    if types and not cast:
        raise UsageError(
            f"{_listed('the checkpoint has other element types', types)}: train in these, or ask for a cast"
        )


def _is_mask(name: str) -> bool:
    return name.startswith(MASKS)


def _shapes(name: str, saved: TensorEntry, wanted: Expected) -> str:
    return f"{name} {list(saved.shape)} there, {list(wanted.shape)} here"


def _absent(names: Iterable[str], other: Collection[str]) -> list[str]:
    return [name for name in names if name not in other]


def _listed(what: str, items: Sequence[str]) -> str:
    items = list(dict.fromkeys(items))
    if not items:
        return ""
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return f"{what}: {', '.join(items[:_NAMED])}{more}"


def empty(entry: TensorEntry) -> Tensor:
    """Memory for the whole tensor. Raises `OutOfMemory` where there is not enough."""
    try:
        return torch.empty(entry.shape, dtype=BY_NAME[entry.dtype].torch)
    except (RuntimeError, MemoryError) as error:
        raise OutOfMemory(
            f"{entry.name} is {entry.dtype} {entry.shape}, and this machine has no memory for it: use a larger one"
        ) from error


def _expected(name: str, target: Target) -> Expected:
    return Expected(tuple(target.global_shape), dtype_name(target.tensor, name))


def _fill(manifest: Manifest, places: Places, parts: Mapping[str, Sequence[Target]]) -> None:
    """Object by object, so that each file is opened once."""
    wanted: dict[str, list[_Copy]] = defaultdict(list)
    for entry in manifest.tensors:
        for target in parts.get(entry.name, ()):
            for box in entry.boxes:
                shared = intersection(box.box, target.box)
                if shared is not None:
                    wanted[box.object].append(_Copy(entry, box, shared, target))
    for digest, copies in wanted.items():
        if digest not in manifest.encoded:
            _read(places.object(digest), copies)

    def decode(digest: str) -> None:
        _decode(EncodedObject(digest, manifest, places), wanted[digest])

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in in_order(pool, decode, [digest for digest in wanted if digest in manifest.encoded]):
            pass


def _read(path: Path, copies: Iterable[_Copy]) -> None:
    content = tensorfile.read(path)
    for copy in copies:
        copy.run(_part(content, copy.entry, copy.box, path))


def _decode(content: EncodedObject, copies: Iterable[_Copy]) -> None:
    """Box by box: several have one key where their bits are equal, whatever their shapes, types and offsets."""
    by_box: dict[tuple[str | int, ...], list[_Copy]] = defaultdict(list)
    for copy in copies:
        by_box[copy.entry.name, *copy.box.offset].append(copy)
    for same in by_box.values():
        part = content.part(same[0].entry, same[0].box, [copy.shared for copy in same])
        for copy in same:
            copy.run(part)


class _Copy(NamedTuple):
    """What a saved box and a target have in common, in the coordinates of the whole tensor."""

    entry: TensorEntry
    box: BoxEntry
    shared: Box
    target: Target

    def run(self, part: Tensor) -> None:
        source = part[self.shared.relative_to(tuple(self.box.offset)).slices]
        self.target.tensor.detach()[self.shared.relative_to(tuple(self.target.offset)).slices].copy_(source)


def _part(content: Mapping[str, Tensor], entry: TensorEntry, box: BoxEntry, path: Path) -> Tensor:
    part = content.get(box.key)
    if part is None or list(part.shape) != box.shape or part.dtype != BY_NAME[entry.dtype].torch:
        raise CorruptCheckpoint(f"{path} does not hold the box {box.key} of {entry.name}: use another checkpoint")
    return part
