"""What of the model a run does not train, on one membership: masked weights, and layers that are frozen for a while."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoal import units
from shoal.assembly.splitting import Divided, trained_in
from shoal.checkpoint.commit import checkpoint_in, read_manifest
from shoal.checkpoint.load import read_all
from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import AllReduce, NewExchange
from shoal.comm.mesh import Mesh
from shoal.engine.state import MODEL, TrainState
from shoal.engine.updates import LeavesOut
from shoal.errors import ConfigError
from shoal.models.adapters import in_head
from shoal.models.config import GPTConfig, ModelConfig
from shoal.models.huggingface.config import TransformersConfig, config_keys
from shoal.models.roles import Role
from shoal.optim.fused import FusedOptimizer
from shoal.optim.schedule import peak_rate, rate
from shoal.parallel.split import Split, Unsplit
from shoal.runfile.run_file import RunFile
from shoal.sparsity.changes import MaskPlan, Ticket, undivided
from shoal.sparsity.config import Lottery, Sparse
from shoal.sparsity.freezing import Freezing, block_names
from shoal.sparsity.masks import Masks, Owners, PackedBy, unit_groups
from shoal.sparsity.plasticity import Activations
from shoal.sparsity.semi_structured import SemiStructured, check_device, of_device
from shoal.sparsity.training import PackedState, SparseTraining, WholeNorm
from shoal.state import Owned
from shoal.topology.holding import Dims

DENSE_KINDS = ("embedding", "head", "router", "norm", "table")
"""What stays dense unless `sparsity.layers` names it."""
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
        refused = {name: why for name, shape in found.items() if (why := undivided(name, shape, config)) is not None}
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
        return {n: s for n, s in able.items() if n not in split.lookups and _is_layer(n, s, split.roles[n])}
    if config.layers is not None:
        _check_patterns(config.layers, able)
    patterns = config.layers or REMOVABLE[config.pattern]
    return {n: s for n, s in able.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}


def said_of_masks(run_file: RunFile, split: Split) -> str:
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


def _is_layer(name: str, shape: Dims, role: Role) -> bool:
    """Position embeddings and class tokens of vision models are parameters `[1, ...]`, for all samples."""
    return role.kind not in DENSE_KINDS and not in_head(name) and not (len(shape) > 2 and shape[0] == 1)


def _check_patterns(patterns: tuple[str, ...], able: dict[str, Dims]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in able):
            some = ", ".join(list(able)[:3])
            raise ConfigError(
                f"sparsity.layers: {json.dumps(pattern)} matches no trained weight of two dimensions or more; this "
                f"model has {some}, ..."
            )


def packed_exchange(run_file: RunFile, parts: Divided, mesh: Mesh, masks: Masks, otherwise: NewExchange) -> NewExchange:
    """An exchange of what masks and freezing leave of gradients where ranks all-reduce them, else `otherwise`."""
    masked = run_file.sparsity is not None and run_file.sparsity.packed
    freezes = run_file.freeze is not None and run_file.freeze.changes
    if not (masked or freezes) or otherwise is not AllReduce or mesh.layout.shard > 1 or mesh.world.size == 1:
        return otherwise
    layers = masked_layers(run_file, parts.split) if masked else ()
    holdings = {t.holding.name: t.holding for t in trained_in(parts) if t.holding.name in layers}
    return PackedBy(masks, holdings)


class Placed(NamedTuple):
    """Where parameters are, and in which type."""

    device: torch.device
    dtype: torch.dtype


def build_sparse(
    run_file: RunFile,
    split: Split,
    owned: Sequence[Owned],
    optimizer: torch.optim.Optimizer,
    *,
    masks: Masks,
    group: Collective,
    placed: Placed,
    replica: Collective | None = None,
) -> SparseTraining:
    """What masks the gradients and weights of the parts `owned`, which `optimizer` steps; the ranks of `group` have the
    same masks, those of `replica` (None: of `group`) together one model.

    Raises `ConfigError` for layers or patterns that cannot be.
    """
    config, layers = run_file.sparsity, masked_layers(run_file, split)
    assert config is not None, "there is a table [sparsity]"
    kinds = {name: split.roles[name].kind for name in layers}
    heads = key_heads(run_file.model) if config.pattern == "heads" else None
    groups = unit_groups(layers, kinds, pattern=config.pattern, heads=heads) if config.removes else []
    stepped = [own for own in owned if own.name in layers]
    home = None  # not all references of `shoal verify` take one
    if config.packed_state and isinstance(optimizer, FusedOptimizer) and optimizer.takes_home:
        optimizer.home = home = PackedState()
    return SparseTraining(
        MaskPlan(config, run_file.run.steps),
        Owners(stepped, layers, group, placed.device, placed.dtype, groups),
        masks,
        optimizer,
        seed=run_file.run.seed,
        held={own.name for own in owned} | {holding.name for holding, _ in split.held},
        whole_norm=WholeNorm(owned, replica or group, placed.device),
        ticket=_ticket(config, placed.device),
        state_home=home,
        products=_products(config, split, layers, placed.device),
    )


def _products(config: Sparse, split: Split, layers: Iterable[str], device: torch.device) -> SemiStructured | None:
    """What computes with the kept half of weights. Raises `ConfigError` where nothing does."""
    if config.products == "dense":
        return None
    check_device(device)
    modules = {name: split.model.get_submodule(name.rpartition(".")[0]) for name in layers}
    return SemiStructured(modules, of_device, both=config.transposable)


def build_freezing(
    run_file: RunFile,
    parts: Divided,
    owned: Sequence[Owned],
    optimizer: torch.optim.Optimizer,
    *,
    masks: Masks,
    mesh: Mesh,
    replica: Collective,
) -> Freezing:
    """What freezes layers for a part of the run. `replica`: see `build_sparse`."""
    config, split = run_file.freeze, parts.split
    assert config is not None, "there is a table [freeze]"
    peak, _ = peak_rate(run_file.optimizer, global_samples=run_file.batch.global_samples)
    parameters = {trained.holding.name: trained.parameter for trained in trained_in(parts)}
    names = [name for name in split.shapes if name not in split.frozen]
    activations = None
    if config.progress is not None and config.progress.criterion == "activations":
        activations = Activations(split.model, parameters, block_names(names), mesh.world)
    return Freezing(
        config,
        parameters,
        owned,
        optimizer,
        names=names,
        activations=activations,
        replica=replica,
        masks=masks,
        rate=lambda step: rate(run_file.schedule, peak, step=step, steps=run_file.run.steps),
    )


def left_out_in(state: TrainState) -> list[LeavesOut]:
    """What of a run's state leaves a part of the model out of its steps: freezing, then masks."""
    return [section for section in state.others if isinstance(section, Freezing | SparseTraining)]


def _ticket(config: Sparse, device: torch.device) -> Ticket | None:
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
