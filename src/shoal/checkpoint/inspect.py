"""What `shoal checkpoint` does: list and verify what lies in a run directory, compare, export and import weights.

Two checkpoints are compared tensor by tensor, whatever layouts wrote them. An exported file is one safetensors file of
the unsplit model (https://github.com/huggingface/safetensors) under the model's own names, without the prefix that a
checkpoint gives them; an imported one becomes a checkpoint that holds weights alone, for `run.warm_start` and
`shoal evaluate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.commit import (
    Finding,
    checkpoint_in,
    checkpoints,
    findings,
    latest_finding,
    read_manifest,
    run_directory_of,
    unprotected,
)
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.load import empty, read_all, read_into
from shoal.checkpoint.manifest import Manifest, TensorEntry
from shoal.checkpoint.objects import (
    MANIFEST,
    WEIGHTS,
    Places,
    require_checkpoints,
    require_folder,
    require_weights,
    step_name,
    temporary,
)
from shoal.checkpoint.save import Saver
from shoal.errors import EnvironmentFault, UsageError, VerificationFailed
from shoal.files import printable

DISK_S = 600.0
"""A disk that does nothing for this long while weights are imported hangs."""

Kind = Literal["only in the first", "only in the second", "shape", "type", "values"]


class Difference(msgspec.Struct, frozen=True):
    """One tensor that is not the same in both.

    `first` and `second` say what it is there. `max_abs` is the largest absolute difference of the values, None where
    shapes differ, where one is missing, or where it is not finite.
    """

    name: str
    kind: Kind
    first: str | None
    second: str | None
    max_abs: float | None = None


class Comparison(msgspec.Struct, frozen=True):
    """Two checkpoints: the steps they are of, how many tensors are the same, and those that are not, by name."""

    first_step: int
    second_step: int
    same: int
    differences: list[Difference]


def compare(first: Path, second: Path) -> Comparison:
    """What differs between two checkpoints, or the newest whole ones of run directories, a tensor at a time.

    Raises `UsageError` where there is no checkpoint, `CorruptCheckpoint` where a file is damaged.
    """
    folders = checkpoint_in(first), checkpoint_in(second)
    a, b = (read_manifest(folder) for folder in folders)
    found = list(_differences((a, run_directory_of(folders[0])), (b, run_directory_of(folders[1]))))
    names = {entry.name for manifest in (a, b) for entry in manifest.tensors}
    return Comparison(a.step, b.step, len(names) - len(found), found)


_Source = tuple[Manifest, Path]


def _differences(first: _Source, second: _Source) -> Iterator[Difference]:
    ours, theirs = ({entry.name: entry for entry in manifest.tensors} for manifest, _ in (first, second))
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            kind: Kind = "only in the first" if b is None else "only in the second"
            yield Difference(name, kind, _said(a), _said(b))
        elif a.shape != b.shape:
            yield Difference(name, "shape", _said(a), _said(b))
        elif a != b:  # Equal boxes in equal objects are equal bytes.
            values = _values(first, a), _values(second, b)
            if a.dtype != b.dtype:
                yield Difference(name, "type", _said(a), _said(b), _max_abs(*values))
            elif not _same(*values):
                yield Difference(name, "values", _said(a), _said(b), _max_abs(*values))


def _said(entry: TensorEntry | None) -> str | None:
    return None if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _values(source: _Source, entry: TensorEntry) -> Tensor:
    manifest, directory = source
    tensor = empty(entry)
    read_into(manifest, directory, {entry.name: tensor}, strict=False)
    return tensor


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bits: a negative zero is not a zero, and a NaN is itself."""
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def _max_abs(a: Tensor, b: Tensor) -> float | None:
    if not a.numel():
        return 0.0
    largest = (a.to(torch.float64) - b.to(torch.float64)).abs().max()
    return float(largest) if bool(largest.isfinite()) else None


class Row(msgspec.Struct, frozen=True):
    """One checkpoint. `created` is in unix seconds; what an unreadable manifest would have said is None.

    `nbytes` counts the objects that the checkpoint names, those it shares with others included. `verified` says that
    every byte is as it was written; `protected` that the manifest has a hash, which earlier versions did not write.
    `best`: it is the one that `checkpoint.keep_best` keeps.
    """

    step: int
    created: float | None
    nbytes: int | None
    tensors: int | None
    verified: bool
    protected: bool
    best: bool = False


def listing(directory: Path) -> list[Row]:
    """A row for each checkpoint of a run directory, newest first; every object is hashed."""
    require_folder(directory)
    best = Places(directory).best.resolve().name
    rows = [_row(folder, directory) for folder in checkpoints(directory)]
    return [msgspec.structs.replace(row, best=step_name(row.step) == best) for row in rows]


def verify(directory: Path, step: int | None = None) -> list[Finding]:
    """What is wrong with the checkpoint of `step`, or with any of them and `latest` when it is None.

    Raises `UsageError` where there is no such checkpoint.
    """
    require_checkpoints(directory)
    folders = checkpoints(directory)
    if step is not None:
        folders = [folder for folder in folders if folder == Places(directory).step(step)]
        if not folders:
            raise UsageError(f"{directory} has no checkpoint of step {step}: `shoal checkpoint ls` shows those it has")
    pointer = latest_finding(directory) if step is None else None
    found = [finding for folder in folders for finding in _findings(folder, directory)]
    return [*found, pointer] if pointer is not None else found


def unprotected_notes(directory: Path, step: int | None = None) -> list[str]:
    """A sentence for each checkpoint, or that of `step`, whose manifest an earlier version wrote without a hash."""
    notes: list[str] = []
    for folder in checkpoints(directory):
        with suppress(VerificationFailed):
            manifest = read_manifest(folder)
            note = unprotected(manifest)
            if note and step in (None, manifest.step):
                notes.append(note)
    return notes


def _findings(folder: Path, directory: Path) -> list[Finding]:
    try:
        return list(findings(read_manifest(folder), directory))
    except VerificationFailed as error:
        return [Finding(_step(folder), str(folder / MANIFEST), [], str(error))]


def _row(folder: Path, directory: Path) -> Row:
    try:
        manifest = read_manifest(folder)
    except VerificationFailed:
        return Row(_step(folder), None, None, None, verified=False, protected=False)
    verified = not any(findings(manifest, directory))
    nbytes = sum(manifest.objects.values())
    return Row(manifest.step, manifest.created, nbytes, len(manifest.tensors), verified, protected=bool(manifest.hash))


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


PREFIX = "model/"
AVERAGES = "optimizer/average/"
"""Of weights that a run is evaluated under (`optimizer.average`, schedule-free optimizers)."""


def weights_of(source: Path) -> dict[str, Tensor]:
    """The weights of the checkpoint `source`, or of a run directory's newest, by the model's own names."""
    folder = checkpoint_in(source)
    return shown_weights(read_manifest(folder), folder.parent.parent)


def shown_weights(manifest: Manifest, directory: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint of the run directory, by the model's own names; averages where it holds some."""
    averages = {name.removeprefix(AVERAGES): tensor for name, tensor in read_all(manifest, directory, AVERAGES).items()}
    weights = read_all(manifest, directory, PREFIX)
    return {name.removeprefix(PREFIX): weight for name, weight in weights.items()} | averages


def require_weights_of(model: nn.Module, weights: Mapping[str, Tensor], *, source: str | Path) -> None:
    """Raises `UsageError` where `weights`, read from `source`, are not those of a module like `model`."""
    own = model.state_dict(keep_vars=True)
    found = {id(tensor) for name, tensor in own.items() if name in weights}
    missing = [name for name, tensor in own.items() if id(tensor) not in found]
    unlike = [name for name, tensor in own.items() if name in weights and weights[name].shape != tensor.shape]
    unknown = sorted(weights.keys() - own.keys())
    for names, what in ((missing, "has no"), (unlike, "has another shape of"), (unknown, "has, and the model lacks,")):
        if names:
            raise UsageError(f"{source} {what} '{names[0]}': give a module like the one that was trained, unsplit")


@torch.no_grad()
def copy_weights(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Into the parameters and buffers of the same names. A tied parameter is saved under its first name alone."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in weights:
            tensor.copy_(weights[name])


def export(source: Path, file: Path, *, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> int:
    """Write the weights of the checkpoint `source`, or of a run directory's newest, to `file`; the step they are from.
    `change` makes of them what is written.

    Raises `UsageError` where there is nothing to export or `file` exists.
    """
    if file.exists():
        raise UsageError(f"{file} exists: give another name, or move it away")
    folder = checkpoint_in(source)
    manifest = read_manifest(folder)
    weights = shown_weights(manifest, run_directory_of(folder))
    if not weights:
        raise UsageError(f"{folder} holds no weights: no tensor in it is called {PREFIX}...")
    write_weights(change(weights), file)
    return manifest.step


def in_dtype(weights: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """What is floating in `weights` as "float32" or "bfloat16"; "saved": as it is."""
    if dtype == "saved":
        return dict(weights)
    kind = getattr(torch, dtype)
    return {name: each.to(kind) if each.is_floating_point() else each for name, each in weights.items()}


def write_weights(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write `weights` to `file` in safetensors' format, whole or not at all. Raises `EnvironmentFault`."""
    unfinished = temporary(file, "export")
    try:
        save_file(dict(weights), unfinished)
        os.replace(unfinished, file)
    except (OSError, SafetensorError) as error:
        raise EnvironmentFault(f"{file} cannot be written ({error}): give a place that can") from error
    finally:
        unfinished.unlink(missing_ok=True)


def import_weights(file: Path, directory: Path) -> Path:
    """Make the weights in `file` the checkpoint of step 0 of a new run directory; its folder.

    Raises `UsageError` where `directory` has checkpoints already, or `file` is no safetensors file.
    """
    if checkpoints(directory):
        raise UsageError(f"{directory} holds checkpoints of a run: give a new folder")
    require_weights(file)
    try:
        weights = load_file(file)
    except (SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        raise UsageError(f"{printable(file)} cannot be read as a safetensors file ({error}): {WEIGHTS}") from error
    return save_weights(weights, file, directory)


def save_weights(weights: Mapping[str, Tensor], source: Path, directory: Path) -> Path:
    """Make `weights`, read from `source`, the checkpoint of step 0 of a new run directory; its folder."""
    config = CheckpointConfig(keep=1)
    saver = Saver(directory, rank=0, world_size=1, exchange=LocalExchange(), config=config, timeout_s=DISK_S)
    tensors = {f"{PREFIX}{name}": weight for name, weight in weights.items()}
    saver.save(0, tensors, {"imported": printable(source.name)}, layout={})
    (report,) = saver.wait()
    if not report.committed:
        raise EnvironmentFault(f"{source} was not imported: {report.error}")
    return Places(directory).step(0)
