"""Folders of transformers and checkpoints: weights out and in, bit by bit.

A checkpoint has the model's parameters under the names that they have in transformers, tied ones once. So a folder is
written by transformers' own `save_pretrained` (which shards, unties and renames), and read by its `from_pretrained`.
Of a model with adapters the folder gets the adapters alone, in peft's format.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.commit import checkpoint_in, checkpoints, read_manifest, run_directory_of
from shoal.checkpoint.objects import temporary
from shoal.checkpoint.weights import save_weights, shown_weights
from shoal.errors import EnvironmentFault, UsageError
from shoal.models.huggingface.build import build, plain, without_bars
from shoal.models.huggingface.config import TransformersConfig


def export_folder(
    source: Path,
    folder: Path,
    table: TransformersConfig,
    *,
    dtype: str = "saved",
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> int:
    """Writes the weights of the checkpoint `source`, or of a run directory's newest, as a folder for `from_pretrained`.

    `table` is the run's table `[model]`; `dtype` "float32" or "bfloat16", or "saved" as the weights are; `change` makes
    others of them, such as those that adapters were merged into. Returns the step that they are from. Raises
    `UsageError` where `folder` exists or the weights are not those of the model.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists: give another name, or move it away")
    checkpoint = checkpoint_in(source)
    manifest = read_manifest(checkpoint)
    weights = change(shown_weights(manifest, run_directory_of(checkpoint)))
    model = plain(table)
    _fill(model, weights, checkpoint)
    if dtype != "saved":
        model.to(getattr(torch, dtype))
    unfinished = temporary(folder, "export")
    try:
        with without_bars():
            model.save_pretrained(unfinished)
        os.replace(unfinished, folder)
    except OSError as error:
        raise EnvironmentFault(f"{folder} cannot be written ({error}): give a place that can") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest.step


def import_folder(folder: Path, directory: Path) -> Path:
    """Makes the weights of a folder of transformers the checkpoint of step 0 of a new run directory; its folder.

    Raises `UsageError` where `directory` has checkpoints already, `ConfigError` where the folder cannot be loaded.
    """
    if checkpoints(directory):
        raise UsageError(f"{directory} holds checkpoints of a run: give a new folder")
    model = build(TransformersConfig(folder=str(folder)))
    return save_weights(_tensors(model), folder, directory)


def _tensors(model: Any) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that are saved."""
    saved = set(model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {name: tensor.detach() for name, tensor in (dict(model.named_parameters()) | buffers).items()}


@torch.no_grad()
def _fill(model: Any, weights: dict[str, Tensor], checkpoint: Path) -> None:
    """Gives `model` these weights in their own types. Raises `UsageError` unless they are all of its own."""
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    wanted = {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in [name for name in wanted if name.endswith("num_batches_tracked") and name not in found]:
        del wanted[name]  # model.batch_norm: such a norm counts no batches, and its momentum needs no count
    if found != wanted:
        name = sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))[0]
        raise UsageError(
            f"{checkpoint} is not of {type(model).__name__}: its tensor {name} is {found.get(name, 'missing')}, and "
            f"the model's is {wanted.get(name, 'missing')}; give the run directory that the checkpoint is from"
        )
    for name, weight in weights.items():
        targets[name].data = weight
