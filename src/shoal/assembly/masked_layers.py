"""Which layers of a model `[sparsity]` masks, and the run that a lottery ticket comes from."""

from __future__ import annotations

import json
import math
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from shoal import units
from shoal.checkpoint.commit import checkpoint_in, read_manifest
from shoal.checkpoint.load import read_all
from shoal.engine.state import MODEL
from shoal.errors import ConfigError
from shoal.models.adapters import in_head
from shoal.models.config import GPTConfig, ModelConfig
from shoal.models.huggingface.config import TransformersConfig, config_keys
from shoal.models.roles import AS_IT_IS
from shoal.parallel.split import Split, Unsplit
from shoal.runfile.run_file import RunFile
from shoal.sparsity.changes import Ticket
from shoal.sparsity.config import Lottery, Sparse
from shoal.sparsity.patterns import undivided
from shoal.topology.holding import Dims

DENSE_KINDS = ("embedding", "head", "router", "norm", "table")
"""What stays dense unless `sparsity.layers` names it."""
DENSE_WORDS = frozenset(
    {
        *("bias", "biases", "scale", "gamma", "beta", "log"),
        *("pos", "position", "positional", "positions", "embed", "embedding", "embeddings", "token", "tokens"),
    }
)
"""As well a parameter with one of them in its own name, as `relative_position_bias_table`, `cls_token` or `A_log`."""
ROUTERS = ("gate", "router", "shared_expert_gate")
REMOVABLE = {"features": ("*.feed_forward.*", "*.mlp.*"), "heads": ("*.attention.*", "*.self_attn.*")}
"""The layers of what can be taken out, by pattern, as Shoal's models and those of transformers call them."""


def masked_layers(run_file: RunFile, split: Split | Unsplit) -> dict[str, Dims]:
    """The layers that are masked, by name in the unsplit model, and their shapes; the same on all ranks.

    Raises `ConfigError` where there is none, or where one of them is tied.
    """
    config = run_file.sparsity
    assert config is not None, "there is a table [sparsity]"
    found = _candidates(config, split)
    if config.layers is None:
        rows = {name: split.stored.get(name, AS_IT_IS).rows_shape(shape) for name, shape in found.items()}
        refused = {name: why for name, shape in rows.items() if (why := undivided(name, shape, config)) is not None}
        if found and len(refused) == len(found):
            raise ConfigError(next(iter(refused.values())))
        found = {name: shape for name, shape in found.items() if name not in refused}
    if not found:
        named = " or ".join(REMOVABLE.get(config.pattern, ()))
        what = f"a name like {named}" if named else "two dimensions or more beside embeddings and its output head"
        raise ConfigError(
            f"[sparsity]: this model has no trained weight of {what}; name weights in sparsity.layers, or leave "
            "[sparsity] out"
        )
    tied = next((name for name in found if name in split.tied), None)
    if tied is not None:
        raise ConfigError(
            f"sparsity.layers: {tied} is tied, and one mask cannot be right for the modules that share it; leave it "
            "out of sparsity.layers, or untie it (model.tied = false)"
        )
    return found


def _candidates(config: Sparse, split: Split | Unsplit) -> dict[str, Dims]:
    """What `sparsity.layers` names, or its default, whether the pattern divides it or not."""
    able = {n: shape for n, shape in split.shapes.items() if len(shape) > 1 and n not in split.frozen}
    if config.layers is None and not config.removes:
        layers = {name: shape for name, shape in able.items() if _is_layer(name, shape, split)}
        return {name: shape for name, shape in layers.items() if name not in split.tied} or layers
    if config.layers is not None:
        _check_patterns(config.layers, able)
    patterns = config.layers or REMOVABLE[config.pattern]
    return {n: s for n, s in able.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}


def said_of_masks(run_file: RunFile, split: Split | Unsplit) -> str:
    """What is masked, and which layers stay dense because the pattern does not divide them."""
    config, masked = run_file.sparsity, masked_layers(run_file, split)
    assert config is not None, "there is a table [sparsity]"
    weights = sum(math.prod(shape) for shape in masked.values())
    dense = [name for name in _candidates(config, split) if name not in masked]
    others = f" and {len(dense) - 3} others" if len(dense) > 3 else ""
    said = f"; {', '.join(dense[:3])}{others} stay dense, which the pattern does not divide" if dense else ""
    return f"masks on {weights:,} weights of {units.plural(len(masked), 'layer')}{said}"


def key_heads(model: ModelConfig) -> int:
    """Key heads of a model's attentions. Raises `ConfigError` where its table does not say it."""
    if isinstance(model, GPTConfig):
        return model.key_value_heads
    keys = config_keys(model) if isinstance(model, TransformersConfig) else {}
    found = keys.get("num_key_value_heads") or keys.get("num_attention_heads")
    if not isinstance(found, int):
        raise ConfigError(
            f'sparsity.pattern = "heads" with model.kind = "{model.variant}": nothing says how many heads there are; '
            "write num_attention_heads and num_key_value_heads in model.config, or use another pattern"
        )
    return found


def _is_layer(name: str, shape: Dims, split: Split | Unsplit) -> bool:
    """Position embeddings and class tokens of vision models are parameters `[1, ...]`, for all samples, and factors of
    channels or heads `[n, 1, 1]`.
    """
    if split.roles[name].kind in DENSE_KINDS or name in split.no_products or in_head(name):
        return False
    path, _, own = name.rpartition(".")
    is_vector = len(shape) > 2 and (shape[0] == 1 or max(shape) == math.prod(shape))
    return not is_vector and DENSE_WORDS.isdisjoint(own.split("_")) and not _routes(path, split)


def _routes(path: str, split: Split | Unsplit) -> bool:
    """Whether a module stands beside experts as their router does."""
    mixture, _, own = path.rpartition(".")
    return own in ROUTERS and any(name.startswith(f"{mixture}.experts.") for name in split.shapes)


def _check_patterns(patterns: tuple[str, ...], able: dict[str, Dims]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in able):
            some = ", ".join(list(able)[:3])
            raise ConfigError(
                f"sparsity.layers: {json.dumps(pattern)} matches no trained weight of two dimensions or more; this "
                f"model has {some}, ..."
            )


def ticket_of(config: Sparse, device: torch.device) -> Ticket | None:
    """Opens the run that a lottery ticket comes from. Raises `UsageError` where there is no checkpoint."""
    if not isinstance(config, Lottery):
        return None
    folder = checkpoint_in(Path(config.ticket))
    manifest = read_manifest(folder)

    def weights(name: str) -> Tensor:
        found = read_all(manifest, folder.parent.parent, f"{MODEL}{name}").get(f"{MODEL}{name}")
        if found is None:
            raise ConfigError(
                f"sparsity.ticket = {json.dumps(config.ticket)} has no {name}: give a run of the same model"
            )
        return found.to(device)

    return weights
