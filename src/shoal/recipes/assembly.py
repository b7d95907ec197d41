"""From the run file's tables to the parts that train: gradients, the strategy's agreement, the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from shoal.codec.config import AutoConfig, DGCConfig, NoCodec
from shoal.comm.exchanges.choice import Choice
from shoal.comm.exchanges.coded import Coded, CodedExchanges
from shoal.comm.exchanges.exchange import AllReduce, NewExchange
from shoal.comm.exchanges.momentum_corrected import MomentumCorrected
from shoal.comm.mesh import Mesh
from shoal.config.table import implementation_of
from shoal.engine.extra_state import ExtraSection
from shoal.engine.forward_backward import ForwardBackward
from shoal.engine.precision import LossScaler
from shoal.engine.state import (
    FactsSection,
    HeldWeight,
    ModelSection,
    OptimizerSection,
    Progress,
    TrainState,
    held_pieces,
)
from shoal.errors import ConfigError
from shoal.gradients.build import Summing, build_gradients
from shoal.gradients.gradients import Gradients
from shoal.gradients.priority import PriorityGradients
from shoal.gradients.residuals import ResidualSection
from shoal.optim.build import build_optimizer
from shoal.optim.schedule import peak_rate
from shoal.recipes.microbatching import Microbatching
from shoal.recipes.splitting import Divided, blocks_in
from shoal.recipes.table_gradients import dense_and_tables, with_tables
from shoal.recipes.workload import Workload
from shoal.runfile.run_file import RunFile
from shoal.state.section import Section
from shoal.sync.build import build_sync
from shoal.sync.event_order import Rounds
from shoal.sync.strategy import Agreement, Replica, Sync
from shoal.topology.axes import Axis

ZERO_OF_SHARD = 3
"""The stage of ZeRO over `layout.shard` if `memory.zero` is left out: everything is divided, as users of FSDP expect.
"""

_NORM_AXES: Mapping[bool, tuple[Axis, ...]] = {
    False: ("pipeline", "shard", "context", "tensor"),
    True: ("shard", "context", "tensor"),
}
"""Whose gradients have one norm: those of a replica, or of one stage if stages are at different updates."""


@dataclass(frozen=True)
class Generation:
    """What stands on one membership: a change of it makes another one. `coded` makes exchanges with a codec."""

    mesh: Mesh
    parts: Divided
    microbatching: Microbatching
    forward_backward: ForwardBackward
    sync: Sync
    gradients: Gradients
    agreement: Agreement
    coded: CodedExchanges | None = None


def zero_of(run_file: RunFile, mesh: Mesh) -> int | None:
    """The stage of ZeRO; None if no rank shares its copy of the model with ranks that see other samples."""
    return None if mesh.layout.shard == 1 else run_file.memory.zero or ZERO_OF_SHARD


def coded_exchanges(run_file: RunFile, mesh: Mesh) -> CodedExchanges | None:
    """What makes exchanges between ranks of `mesh` with the codec of `[codec]`; None without one."""
    config = run_file.codec
    if isinstance(config, NoCodec):
        return None
    new = Coded
    if isinstance(config, DGCConfig):
        new = partial(MomentumCorrected, momentum=config.momentum, clip_norm=config.clip_norm)
    if isinstance(config, AutoConfig):
        candidates = {name: implementation_of(one)(one) for name, one in config.candidates.items()}
        every = config.measure_every if mesh.spans_hosts else None
        codec = partial(Choice, candidates, every=every)
    else:
        codec = implementation_of(config)(config)
    return CodedExchanges(codec, feedback=config.feedback, seed=run_file.run.seed, levels=mesh.levels, new=new)


def build_run_sync(run_file: RunFile, mesh: Mesh) -> Sync:
    """The strategy that the run file asks for. Every rank calls it at the same point: it may open groups."""
    return build_sync(run_file.sync, mesh)


def build_run_gradients(
    run_file: RunFile,
    parts: Divided,
    mesh: Mesh,
    sync: Sync,
    *,
    exchange: NewExchange,
    one_host: bool,
    whole: bool,
) -> Gradients:
    """How this rank's gradients are reduced, and what its optimizer runs on. The parameters' memory may be moved.

    Ranks that sum a gradient do so by `exchange`. `one_host`: all ranks are on one host. `whole`: the optimizer sees
    parameters whole.
    """
    config, (trained, tables) = run_file.gradients, dense_and_tables(run_file, parts)
    if mesh.device.type == "cpu" and not one_host:
        config = config.between_hosts()
    if config.schedule == "priority":
        lane = mesh.axis("replicate", lane="gradients")
        return PriorityGradients(config, trained, model=parts.split.model, lane=lane, ledger=mesh.ledger)
    replica = mesh.axis(*_NORM_AXES[run_file.pipeline.asynchronous])
    dense = build_gradients(
        config,
        trained,
        zero=zero_of(run_file, mesh),
        groups=mesh.ranks,
        replica=replica,
        model=parts.split.model,
        blocks=blocks_in(parts.split.model, parts.stages, mesh.layout.index("pipeline", mesh.rank)),
        summing=Summing(
            sync.gradient_ranks,
            exchange,
            lockstep=mesh.axis(*sync.lockstep_axes),
            whole=whole,
        ),
    )
    return with_tables(dense, tables, parts, groups=mesh.ranks, replica=replica)


def build_agreement(
    run_file: RunFile,
    parts: Divided,
    gradients: Gradients,
    sync: Sync,
    *,
    exchange: NewExchange | None = None,
    rounds: Rounds | None = None,
) -> Agreement:
    """The running side of the strategy, on the parameters that this rank's optimizer updates.

    Replicas that agree on what they changed sum it by `exchange`; None: as it is. `rounds`: see `Replica`.
    """
    model = parts.split.model
    saved = model.state_dict(keep_vars=True)
    buffers = [b for name, b in model.named_buffers() if name in saved and b.is_floating_point()]
    whole = run_file.optimizer.works_on == "matrices"
    return sync.agreement(
        Replica(gradients.owned, gradients.gather, buffers, run_file.run.steps, whole, exchange or AllReduce, rounds)
    )


def build_state(run_file: RunFile, generation: Generation, workload: Workload, scaler: LossScaler) -> TrainState:
    """The state before the first step. Raises `ConfigError` for an optimizer of the script that servers cannot use."""
    split, gradients, own = generation.parts.split, generation.gradients, workload.optimizer
    served = generation.agreement.served
    if served is not None and own is not None:
        raise ConfigError(
            'sync.kind = "server" with an optimizer of the script: servers make theirs from [optimizer]; leave '
            "one of the two out"
        )
    identity = {
        "run.seed": run_file.run.seed,
        "data.shuffle": run_file.data.shuffle,
        "the number of training samples": len(workload.data.train),
        "optimizer.kind": type(run_file.optimizer).__struct_config__.tag if own is None else own.kind,
    }
    model, owned, names = ModelSection(split.model), None, ()
    layout = generation.mesh.layout
    if layout.replica_size > 1:
        owned, names = gradients.owned, {*split.shapes, *split.buffers}
        model = ModelSection(split.model, _held(run_file, generation), owned, names)
    elif served is not None:
        owned, names = served, {*split.shapes}
    shared = served is not None or generation.sync.keeps_replicas_equal
    tuned = [] if gradients.tuned is None else [FactsSection("gradients", gradients.tuned)]
    exchanges = [] if generation.coded is None else generation.coded.made
    residuals = ResidualSection(
        str(type(run_file.codec).__struct_config__.tag), exchanges, gradients.owned, feedback=run_file.codec.feedback
    )
    return TrainState(
        model,
        OptimizerSection(
            _built(run_file, generation) if own is None else own.adopt((o.name, o.parameter) for o in gradients.owned),
            run_file.optimizer.slots if own is None else own.slots,
            split.model,
            owned,
            names,
            replica=None if shared else layout.index("replicate", generation.mesh.rank),
        ),
        Progress(identity),
        [FactsSection("scaler", scaler), *tuned, residuals, *generation.agreement.sections, *_of_script(workload)],
    )


def _built(run_file: RunFile, generation: Generation) -> torch.optim.Optimizer:
    """The run file's optimizer, over what this rank owns, or serves to all."""
    roles, served = generation.parts.split.roles, generation.agreement.served
    stepped = generation.gradients.owned if served is None else served
    parameters = [(owned.name, owned.parameter, roles[owned.name].decay) for owned in stepped]
    peak, _ = peak_rate(run_file.optimizer, global_samples=run_file.batch.global_samples)
    sparse = [name for name, role in roles.items() if role.kind == "table"]
    return build_optimizer(run_file.optimizer, parameters, lr=peak, sparse=sparse)


def _of_script(workload: Workload) -> list[Section]:
    """The state of what a script passed."""
    own = [] if workload.optimizer is None else [FactsSection("optimizer_groups", workload.optimizer)]
    return [*own, *([ExtraSection(workload.objects.state)] if workload.objects.state else [])]


def _held(run_file: RunFile, generation: Generation) -> list[HeldWeight]:
    """The weights that are saved from this rank: what it computes with, or under ZeRO-3 what it updates."""
    split = generation.parts.split
    held = [HeldWeight(holding.name, p, holding.global_shape, holding.box) for holding, p in split.held]
    if zero_of(run_file, generation.mesh) != 3:
        return held
    return [*held_pieces(generation.gradients.owned), *(weight for weight in held if weight.name in split.frozen)]
