"""Is a checkpoint whole? Every object that its manifest names is read and hashed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.objects import damage
from shoal.checkpoint.places import Places

_NAMED = 3


class Finding(msgspec.Struct, frozen=True):
    """Something wrong with the checkpoint of `step`: the file, the tensors that it holds, and a sentence with both."""

    step: int
    path: str
    tensors: list[str]
    sentence: str


def findings(manifest: Manifest, directory: Path) -> Iterator[Finding]:
    """What is wrong with the objects of `manifest`, in the run directory `directory`; nothing when it is whole."""
    places = Places(directory)
    holds = tensors_by_object(manifest)
    for digest, nbytes in manifest.objects.items():
        path = places.object(digest)
        problem = damage(path, digest, nbytes=nbytes)
        if problem:
            names = holds[digest]
            yield Finding(manifest.step, str(path), names, _sentence(manifest.step, path, problem, names))


def tensors_by_object(manifest: Manifest) -> dict[str, list[str]]:
    """The names of the tensors that have a box in each object."""
    holds: dict[str, list[str]] = defaultdict(list)
    for tensor in manifest.tensors:
        for digest in {box.object for box in tensor.boxes}:
            holds[digest].append(tensor.name)
    return holds


def _sentence(step: int, path: Path, problem: str, names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    held = f"{', '.join(names[:_NAMED])}{more}" if names else "no tensor"
    return f"checkpoint of step {step}: {path} {problem}; it holds {held}. Use another checkpoint, and check the disk"
