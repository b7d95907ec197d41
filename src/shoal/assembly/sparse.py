"""What of the model a run does not train, on one membership: masked weights, and layers that are frozen for a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shoal.assembly.masked_layers import key_heads, masked_layers, ticket_of
from shoal.assembly.splitting import Divided, trained_in
from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import AllReduce, NewExchange
from shoal.comm.mesh import Mesh
from shoal.engine.state import TrainState
from shoal.engine.updates import LeavesOut
from shoal.optim.average import Resting
from shoal.optim.fused import FusedOptimizer
from shoal.optim.schedule import peak_rate, rate
from shoal.parallel.split import Split
from shoal.runfile.run_file import RunFile
from shoal.sparsity.config import Sparse
from shoal.sparsity.exchange import PackedBy
from shoal.sparsity.freezing import Freezing, block_names
from shoal.sparsity.mask_plan import MaskPlan
from shoal.sparsity.masks import Masks
from shoal.sparsity.owners import Owners
from shoal.sparsity.packed_state import PackedState
from shoal.sparsity.plasticity import Activations
from shoal.sparsity.semi_structured import SemiStructured, check_device, of_device
from shoal.sparsity.training import SparseTraining, WholeNorm
from shoal.sparsity.units import unit_groups
from shoal.state import Owned


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
    stored, groups = {name: split.stored[name] for name in layers if name in split.stored}, []
    if config.removes:
        groups = unit_groups(layers, kinds, pattern=config.pattern, heads=heads, stored=stored)
    stepped = [own for own in owned if own.name in layers]
    home = None  # not all references of `shoal verify` take one
    if config.packed_state and isinstance(optimizer, FusedOptimizer) and optimizer.takes_home:
        optimizer.home = home = PackedState()
    training = SparseTraining(
        MaskPlan(config, run_file.run.steps),
        Owners(stepped, layers, group, placed.device, placed.dtype, groups, stored),
        masks,
        optimizer,
        seed=run_file.run.seed,
        held={own.name for own in owned} | {holding.name for holding, _ in split.held},
        whole_norm=WholeNorm(owned, replica or group, placed.device),
        ticket=ticket_of(config, placed.device),
        state_home=home,
    )
    training.products = _products(config, split, layers, placed.device)
    return training


def _products(config: Sparse, split: Split, layers: Iterable[str], device: torch.device) -> SemiStructured | None:
    """What computes with the kept half of weights. Raises `ConfigError` where nothing does."""
    if config.products == "dense":
        return None
    check_device(device)
    here = {holding.name for holding, _ in split.held}
    modules = {name: split.model.get_submodule(name.rpartition(".")[0]) for name in layers if name in here}
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
    assert run_file.freeze is not None, "there is a table [freeze]"
    config, split = run_file.freeze.resolved(run_file.run.steps), parts.split
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
        Resting(optimizer, run_file.optimizer.average),
        names=names,
        activations=activations,
        replica=replica,
        masks=masks,
        rate=lambda step: rate(run_file.schedule, peak, step=step, steps=run_file.run.steps),
    )


def left_out_in(state: TrainState) -> list[LeavesOut]:
    """What of a run's state leaves a part of the model out of its steps: freezing, then masks."""
    return [section for section in state.others if isinstance(section, Freezing | SparseTraining)]
