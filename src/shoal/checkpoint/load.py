"""Loading: the newest checkpoint that is whole, read into tensors of any layout by the intersection of boxes.

Nothing in a file is trusted before it is checked, and nothing is unpickled. Objects are mapped, so that a rank that
needs a part of a tensor reads that part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint import tensorfile
from shoal.checkpoint.dtypes import BY_NAME, dtype_name
from shoal.checkpoint.grid import family
from shoal.checkpoint.manifest import BoxEntry, Manifest, TensorEntry
from shoal.checkpoint.matching import Expected, require_match
from shoal.checkpoint.places import MANIFEST, Places, step_name
from shoal.checkpoint.verify import findings
from shoal.errors import CorruptCheckpoint, VerificationFailed
from shoal.topology.box import Box, Dims, intersection


class Target(NamedTuple):
    """A part of a tensor to be filled: `tensor` begins at `offset` of the tensor whose shape is `global_shape`."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def checkpoints(directory: Path) -> list[Path]:
    """The folders of the committed checkpoints of a run directory, newest first; not yet verified."""
    places = Places(directory)
    return [places.step(step) for step in places.steps()]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; `VerificationFailed` when it is damaged or of another format."""
    manifest = manifests.read(folder / MANIFEST)
    if folder.name != step_name(manifest.step):
        raise CorruptCheckpoint(f"{folder} holds step {manifest.step}: rename it to {step_name(manifest.step)}")
    return manifest


def newest_verified(directory: Path) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint of a run directory that is whole, and a sentence for each problem of newer ones.

    Every object is hashed. None when there is no whole checkpoint: with problems, because all are damaged.
    """
    problems: list[str] = []
    for folder in checkpoints(directory):
        try:
            manifest = read_manifest(folder)
        except VerificationFailed as error:
            problems.append(str(error))
            continue
        found = [finding.sentence for finding in findings(manifest, directory)]
        if not found:
            return manifest, problems
        problems.extend(found)
    return None, problems


def read_into(
    manifest: Manifest,
    directory: Path,
    tensors: Mapping[str, Tensor | Target],
    *,
    strict: bool = True,
    cast: bool = False,
) -> list[str]:
    """Fill `tensors` in place from a checkpoint; returns the names it does not hold (none when `strict`).

    A plain tensor is a whole one. Only the families ("model/", "optimizer/") that `tensors` asks for are compared, so
    that weights alone can be loaded strictly. Raises `UsageError` when names (if `strict`), shapes or element types
    (unless `cast`) differ, before anything is changed; `CorruptCheckpoint` when a file is not what the manifest says.
    """
    targets = {name: _target(tensor) for name, tensor in tensors.items()}
    families = {family(name) for name in targets}
    saved = {entry.name: entry for entry in manifest.tensors if family(entry.name) in families}
    wanted = {
        name: Expected(tuple(target.global_shape), dtype_name(target.tensor, name)) for name, target in targets.items()
    }
    require_match(saved, wanted, strict=strict, cast=cast)
    _fill(manifest, Places(directory), targets)
    return [name for name in targets if name not in saved]


def read_all(manifest: Manifest, directory: Path, prefix: str = "") -> dict[str, Tensor]:
    """The whole tensors whose names begin with `prefix`, in memory of their own, under their full names."""
    tensors = {
        entry.name: torch.empty(entry.shape, dtype=BY_NAME[entry.dtype].torch)
        for entry in manifest.tensors
        if entry.name.startswith(prefix)
    }
    read_into(manifest, directory, tensors, strict=False)
    return tensors


def _target(tensor: Tensor | Target) -> Target:
    if isinstance(tensor, Target):
        return tensor
    return Target(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _fill(manifest: Manifest, places: Places, targets: Mapping[str, Target]) -> None:
    """Object by object, so that each file is opened once."""
    wanted: dict[str, list[tuple[TensorEntry, BoxEntry]]] = defaultdict(list)
    for entry in manifest.tensors:
        if entry.name in targets:
            for box in entry.boxes:
                wanted[box.object].append((entry, box))
    for digest, parts in wanted.items():
        path = places.object(digest)
        content: Mapping[str, Tensor] | None = None
        for entry, box in parts:
            shared = _shared(box, targets[entry.name])
            if shared is not None:
                content = content if content is not None else tensorfile.read(path)
                _copy(_part(content, entry, box, path), tuple(box.offset), shared, targets[entry.name])


def _shared(box: BoxEntry, target: Target) -> Box | None:
    return intersection(Box(tuple(box.offset), tuple(box.shape)), Box(target.offset, tuple(target.tensor.shape)))


def _part(content: Mapping[str, Tensor], entry: TensorEntry, box: BoxEntry, path: Path) -> Tensor:
    part = content.get(box.key)
    if part is None or list(part.shape) != box.shape or part.dtype != BY_NAME[entry.dtype].torch:
        raise CorruptCheckpoint(f"{path} does not hold the box {box.key} of {entry.name}: use another checkpoint")
    return part


def _copy(part: Tensor, origin: Dims, shared: Box, target: Target) -> None:
    source = part[shared.relative_to(origin).slices]
    target.tensor.detach()[shared.relative_to(target.offset).slices].copy_(source)
