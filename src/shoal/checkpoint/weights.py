"""The weights of a checkpoint, alone: read, exported to a file, and imported from one.

An exported file is one safetensors file of the unsplit model (https://github.com/huggingface/safetensors) under the
model's own names, without the prefix that a checkpoint gives them; an imported one becomes a checkpoint that holds
weights alone, for `run.warm_start` and `shoal evaluate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.commit import (
    checkpoint_in,
    checkpoints,
    read_manifest,
    run_directory_of,
)
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.load import read_all
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.objects import (
    WEIGHTS,
    Places,
    require_weights,
    temporary,
)
from shoal.checkpoint.save import Saver
from shoal.errors import EnvironmentFault, UsageError
from shoal.files import printable

DISK_S = 600.0
"""A disk that does nothing for this long while weights are imported hangs."""

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
