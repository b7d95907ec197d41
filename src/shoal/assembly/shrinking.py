"""What a run leaves to be deployed: a model without hidden features, heads or experts, or integers for weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomli_w
import torch
from torch import Tensor, nn

from shoal.assembly.masked_layers import REMOVABLE, key_heads
from shoal.assembly.objects import UserObjects, model_of, skeleton_of
from shoal.checkpoint.commit import checkpoint_in, checkpoints, read_manifest, run_directory_of
from shoal.checkpoint.load import read_all
from shoal.checkpoint.weights import save_weights, shown_weights
from shoal.config.load import dumps
from shoal.engine.precision import precision_of
from shoal.errors import ConfigError, UsageError
from shoal.models.adapters import deployed
from shoal.models.config import GPTConfig, ModelConfig
from shoal.models.huggingface.build import architecture_of, check_keys, configuration_of
from shoal.models.huggingface.config import TransformersConfig, config_keys, experts_of
from shoal.models.roles import roles_of, stored_in
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.sparsity.masks import unpacked
from shoal.sparsity.patterns import top
from shoal.sparsity.training import MASK
from shoal.sparsity.units import UnitGroup, expert_groups, kept_units, shrunk, unit_groups, unit_scores
from shoal.topology.holding import Dims


class Smaller(NamedTuple):
    """`left` hidden features, key heads or experts (`what`) in each block, and the table `[model]` of the smaller
    model, of which `changed` are the keys that differ."""

    what: str
    left: int
    model: ModelConfig
    changed: dict[str, Any]


def shrink(source: Path, directory: Path, to: str | None = None) -> Smaller:
    """Writes the weights of the checkpoint `source`, or of a run directory's newest, without what is left out, as the
    checkpoint of step 0 of a new run directory, beside it the table `[model]` of the smaller model and, last of all,
    the run file by which `shoal evaluate` measures it.

    Left out is what the run has masked, or as `to` says ("heads:0.5") what has the smallest weights in each block.
    Raises `UsageError` where nothing can be taken out.
    """
    if checkpoints(directory):
        raise UsageError(f"{directory} holds checkpoints of a run: give a new folder")
    checkpoint = checkpoint_in(source)
    run_directory = run_directory_of(checkpoint)
    run_file, manifest = load_run(run_directory / "run.toml"), read_manifest(checkpoint)
    if not isinstance(run_file.model, GPTConfig | TransformersConfig):
        raise UsageError(
            f'nothing can be taken out: model.kind = "{run_file.model.variant}" has no keys that make it smaller, as a '
            "gpt, a moe and a decoder of transformers have"
        )
    weights = shown_weights(manifest, run_directory)
    if to is None:
        what, groups, kept = _masked(run_file, weights, read_all(manifest, run_directory, MASK), source)
    else:
        what, groups, kept = _smallest(run_file, weights, to)
    smaller, left = shrunk(weights, groups, kept)
    model, changed = _model_with(run_file.model, what, left)
    found = _run_of(run_file, model, directory)
    _check_fits(found, smaller, what)
    save_weights(smaller, source, directory)
    table = {key: value for key, value in msgspec.to_builtins(model).items() if value is not None}
    (directory / "model.toml").write_text(tomli_w.dumps({"model": table}))
    (directory / "run.toml").write_text(dumps(found))
    return Smaller(what, left, model, changed)


def _run_of(run_file: RunFile, model: ModelConfig, directory: Path) -> RunFile:
    """What evaluates the smaller `model` as the run did."""
    run = msgspec.structs.replace(
        run_file.run,
        name=directory.name,
        directory=str(directory.resolve()),
        warm_start=None,
        warm_start_data=False,
    )
    return msgspec.structs.replace(run_file, model=model, run=run, sparsity=None)


def _check_fits(run_file: RunFile, weights: Mapping[str, Tensor], what: str) -> None:
    """Raises `UsageError` where the smaller model has other shapes than `weights`: something else in it, such as a norm
    over all heads, counts what was taken out, or its class does not let heads keep their size.
    """
    for name, parameter in _built(run_file).state_dict(keep_vars=True).items():
        found = weights.get(name)
        if found is not None and found.shape != parameter.shape:
            raise UsageError(
                f"{name} would be {list(found.shape)}, and a model of fewer {what} has {list(parameter.shape)}: they "
                "cannot be taken out of this one"
            )


Units = tuple[str, list[UnitGroup], list[Tensor]]
"""What can be taken out, its groups, and of each the units that stay."""


def _masked(run_file: RunFile, weights: Mapping[str, Tensor], bits: Mapping[str, Tensor], source: Path) -> Units:
    config = run_file.sparsity
    if config is None or not config.removes:
        raise UsageError(
            f'{source} has masked nothing that can be taken out: train it with sparsity.pattern = "features" or '
            '"heads" first, or say what goes by --to'
        )
    shapes = {name.removeprefix(MASK): tuple(weights[name.removeprefix(MASK)].shape) for name in bits}
    if not shapes:
        raise UsageError(f"{source} has masked nothing yet: train it to the end of sparsity.schedule")
    masks = {name: unpacked(bits[f"{MASK}{name}"], shape) for name, shape in shapes.items()}
    groups = _groups(run_file, shapes, config.pattern)
    return config.pattern, groups, [kept_units(group, masks) for group in groups]


def _smallest(run_file: RunFile, weights: Mapping[str, Tensor], to: str) -> Units:
    what, _, share = to.partition(":")
    if what not in (*REMOVABLE, "experts") or not re.fullmatch(r"0?\.\d+", share) or float(share) == 0:
        raise UsageError(f"--to {to}: give features, heads or experts and the share that stays, such as heads:0.5")
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if what == "experts":
        groups = expert_groups(shapes)
    else:
        layers = {n: s for n, s in shapes.items() if len(s) == 2 and any(fnmatchcase(n, p) for p in REMOVABLE[what])}
        groups = _groups(run_file, layers, what, split_alone=True) if layers else []
    if not groups:
        declared = (
            "" if what == "experts" else " that are declared as columns and rows of layers, by its plan or model.roles"
        )
        raise UsageError(f"--to {to}: this model has no {what}{declared}")
    sizes = {name: weight.abs().float() for name, weight in weights.items()}
    kept = [top(unit_scores(group, sizes), max(1, round(float(share) * group.size))) for group in groups]
    return what, groups, kept


def _groups(run_file: RunFile, shapes: Mapping[str, Dims], what: str, *, split_alone: bool = False) -> list[UnitGroup]:
    """`split_alone`: those layers alone that make or read units."""
    model = _built(run_file)
    roles = roles_of(model)
    kinds, stored = {name: role.kind for name, role in roles.items()}, stored_in(model, roles)
    if split_alone:
        shapes = {name: shape for name, shape in shapes.items() if kinds[name] in ("column", "row")}
    heads = key_heads(run_file.model) if what == "heads" else None
    return unit_groups(shapes, kinds, pattern=what, heads=heads, stored=stored)


def _built(run_file: RunFile) -> nn.Module:
    """The run's model; of Shoal's own without storage."""
    objects = UserObjects()
    return skeleton_of(run_file, objects) or model_of(
        run_file, objects, device=torch.device("cpu"), dtype=torch.float32
    )


def _model_with(model: ModelConfig, what: str, left: int) -> tuple[ModelConfig, dict[str, Any]]:
    """The table of the model with so many features, key heads or experts, and the keys that differ."""
    if isinstance(model, TransformersConfig):
        return _transformers_with(model, what, left)
    assert isinstance(model, GPTConfig), "it was asked before"
    changed: dict[str, Any] = {"feed_forward_width": left}
    if what == "heads":
        queries = left * model.heads // model.key_value_heads
        changed = {"heads": queries, "kv_heads": left, "head_size": model.size_of_head}
    if what == "experts":
        changed = {"experts": left}
    try:
        return msgspec.convert(msgspec.to_builtins(model) | changed, type(model)), changed
    except msgspec.ValidationError as error:
        raise UsageError(f"the smaller model cannot be: {error}") from None


def _transformers_with(model: TransformersConfig, what: str, left: int) -> tuple[TransformersConfig, dict[str, Any]]:
    """Raises `UsageError` where the class's config has no key for it."""
    architecture = architecture_of(model)
    config = configuration_of(model, architecture)
    changed: dict[str, Any] = {"intermediate_size": left}
    if what == "heads":
        keys = getattr(config, "num_key_value_heads", None)
        queries = left * config.num_attention_heads // (keys or config.num_attention_heads)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        changed = {"num_attention_heads": queries, "head_dim": size}
        changed |= {} if keys is None else {"num_key_value_heads": left}
    if what == "experts":
        chosen = getattr(config, "num_experts_per_tok", None) or 0
        if chosen > left:
            raise UsageError(
                f"num_experts_per_tok = {chosen} in the model's config, and {left} experts would be left: leave more, "
                "or train with fewer a token"
            )
        found = experts_of(model)
        changed = {found[0] if found else "num_experts": left}
    try:
        check_keys(changed, architecture)
    except ConfigError as error:
        raise UsageError(f"no {architecture.__name__} can be built with fewer {what}: {error}") from None
    written = config_keys(model) | changed
    smaller = msgspec.structs.replace(
        model, architecture=model.architecture or architecture.__name__, config=written, folder=None, missing=[]
    )
    return smaller, {"config": changed}


def as_integers(weights: dict[str, Tensor], run_file: RunFile) -> dict[str, Tensor]:
    """`weights` of a run as `models.adapters.deployed` has them. Raises `UsageError` where nothing is rounded."""
    if run_file.quantisation is None:
        raise UsageError("the run has no table [quantisation]: leave out --integers")
    objects, cpu = UserObjects(), torch.device("cpu")
    return deployed(weights, model_of(run_file, objects, device=cpu, dtype=precision_of(run_file.precision).parameters))


def sentence(smaller: Smaller, directory: Path) -> str:
    """What was written, and how to go on."""
    keys = " ".join(f"model.{key}={json.dumps(value)}" for key, value in smaller.changed.items())
    if "config" in smaller.changed:
        keys = f"and the table [model] in {directory / 'model.toml'}"
    what = "key heads" if smaller.what == "heads" else smaller.what
    return (
        f"{directory}: {smaller.left} {what} in each block; go on with run.warm_start={json.dumps(str(directory))} "
        f"{keys}, without [sparsity]"
    )
