"""What a run leaves to be deployed: a model without its masked features, or integers in the place of weights."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import tomli_w
import torch
from torch import Tensor

from shoal.assembly.objects import UserObjects, model_of, skeleton_of
from shoal.checkpoint.commit import checkpoint_in, checkpoints, read_manifest, run_directory_of
from shoal.checkpoint.inspect import save_weights, shown_weights
from shoal.checkpoint.load import read_all
from shoal.engine.precision import precision_of
from shoal.errors import UsageError
from shoal.models.adapters import deployed
from shoal.models.config import GPTConfig
from shoal.models.roles import roles_of
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.sparsity.masks import feature_groups, shrunk, unpacked
from shoal.sparsity.training import MASK


def shrink(source: Path, directory: Path) -> int:
    """Writes the weights of the checkpoint `source`, or of a run directory's newest, without masked features, as the
    checkpoint of step 0 of a new run directory, and beside it the table `[model]` of the smaller model.

    Returns the features that each feed-forward has left. Raises `UsageError` where nothing can be taken out.
    """
    if checkpoints(directory):
        raise UsageError(f"{directory} holds checkpoints of a run: give a new folder")
    checkpoint = checkpoint_in(source)
    run_directory = run_directory_of(checkpoint)
    run_file, manifest = load_run(run_directory / "run.toml"), read_manifest(checkpoint)
    if (
        run_file.sparsity is None
        or run_file.sparsity.pattern != "features"
        or not isinstance(run_file.model, GPTConfig)
    ):
        raise UsageError(
            f'{source} has no masked features to take out: train a GPT with sparsity.pattern = "features" first'
        )
    skeleton = skeleton_of(run_file, UserObjects())
    assert skeleton is not None, "a GPT is Shoal's own"
    kinds = {name: role.kind for name, role in roles_of(skeleton).items()}
    weights = shown_weights(manifest, run_directory)
    masks = {
        name.removeprefix(MASK): unpacked(bits, tuple(weights[name.removeprefix(MASK)].shape))
        for name, bits in read_all(manifest, run_directory, MASK).items()
    }
    if not masks:
        raise UsageError(f"{source} has masked nothing yet: train it to the end of sparsity.schedule")
    shapes = {name: tuple(mask.shape) for name, mask in masks.items()}
    smaller, left = shrunk(weights, masks, feature_groups(shapes, kinds))
    save_weights(smaller, source, directory)
    model = msgspec.structs.replace(run_file.model, feed_forward_width=left)
    table = {key: value for key, value in msgspec.to_builtins(model).items() if value is not None}
    (directory / "model.toml").write_text(tomli_w.dumps({"model": table}))
    return left


def as_integers(weights: dict[str, Tensor], run_file: RunFile) -> dict[str, Tensor]:
    """`weights` of a run as `models.adapters.deployed` has them. Raises `UsageError` where nothing is rounded."""
    if run_file.quantisation is None:
        raise UsageError("the run has no table [quantisation]: leave out --integers")
    objects, cpu = UserObjects(), torch.device("cpu")
    return deployed(weights, model_of(run_file, objects, device=cpu, dtype=precision_of(run_file.precision).parameters))


def sentence(left: int, directory: Path) -> str:
    """What was written, and how to go on."""
    start = json.dumps(str(directory))
    return (
        f"{directory}: {left} features in each feed-forward; go on with run.warm_start={start} "
        f"model.feed_forward_width={left}, without [sparsity]"
    )
