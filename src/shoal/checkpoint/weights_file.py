"""Weights in and out: one safetensors file of the unsplit model, which other programs read and write.

An exported file has the model's own names, without the prefix that a checkpoint gives them. An imported one becomes a
checkpoint that holds weights alone, for `run.warm_start` and `shoal evaluate`.
Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shoal.checkpoint.exchange import LocalExchange
from shoal.checkpoint.load import checkpoint_in, checkpoints, read_all, read_manifest
from shoal.checkpoint.places import Places, temporary
from shoal.checkpoint.save import Saver
from shoal.errors import EnvironmentFault, UsageError

PREFIX = "model/"


def export(source: Path, file: Path) -> int:
    """Write the weights of the checkpoint `source`, or of a run directory's newest, to `file`; the step they are from.

    Raises `UsageError` where there is nothing to export or `file` exists.
    """
    if file.exists():
        raise UsageError(f"{file} exists: give another name, or move it away")
    folder = checkpoint_in(source)
    manifest = read_manifest(folder)
    weights = read_all(manifest, folder.parent.parent, PREFIX)
    if not weights:
        raise UsageError(f"{folder} holds no weights: no tensor in it is called {PREFIX}...")
    unfinished = temporary(file, "export")
    try:
        save_file({name.removeprefix(PREFIX): weight for name, weight in weights.items()}, unfinished)
        os.replace(unfinished, file)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise EnvironmentFault(f"{file} cannot be written ({error}): give a place that can") from error
    return manifest.step


def import_weights(file: Path, directory: Path) -> Path:
    """Make the weights in `file` the checkpoint of step 0 of a new run directory; its folder.

    Raises `UsageError` where `directory` has checkpoints already, or `file` is no safetensors file.
    """
    if checkpoints(directory):
        raise UsageError(f"{directory} holds checkpoints of a run: give a new folder")
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} cannot be read as a safetensors file ({error}): export it in that format") from error
    saver = Saver(directory, rank=0, world_size=1, exchange=LocalExchange(), keep=1)
    tensors = {f"{PREFIX}{name}": weight for name, weight in weights.items()}
    saver.save(0, tensors, {"imported": file.name}, layout={})
    (report,) = saver.wait()
    if not report.committed:
        raise EnvironmentFault(f"{file} was not imported: {report.error}")
    return Places(directory).step(0)
