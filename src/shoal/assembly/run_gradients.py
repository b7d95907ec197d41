"""The gradients that a run file asks for, on one membership: which stage of ZeRO, one set for each optimizer.

The gradients of a run whose model has embedding tables: theirs are sparse, and apart from the dense ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal import units
from shoal.assembly.coding import piece_codecs
from shoal.assembly.splitting import Divided, blocks_in, trained_in
from shoal.comm.collective import Collective
from shoal.comm.exchanges.credited import NewPartitionSum
from shoal.comm.exchanges.exchange import AllReduce, NewExchange, PieceHome
from shoal.comm.mesh import Mesh
from shoal.engine.precision import precision_of
from shoal.errors import ConfigError
from shoal.gradients.bucket import ALIGNMENT, GradientRanks, units_of
from shoal.gradients.build import Summing, build_gradients
from shoal.gradients.gradients import Gradients, Groups, JointGradients, VisibleGradients
from shoal.gradients.masters import narrowed
from shoal.gradients.priority import PriorityGradients
from shoal.gradients.sparse_rows import WithSparseRows
from shoal.memory.config import MemoryConfig
from shoal.optim.adopt import OwnOptimizer
from shoal.optim.build import asked
from shoal.optim.config import PythonOptimizer
from shoal.optim.declared import Granularity
from shoal.optim.parts import Parts
from shoal.runfile.run_file import RunFile
from shoal.state import Owned, Trained
from shoal.sync.strategy import Sync
from shoal.topology.layout import Axis, Layout


def dense_and_tables(run_file: RunFile, parts: Divided) -> tuple[list[Trained], list[Trained]]:
    """The trained parameters with dense gradients, and the tables.

    Raises `ConfigError` for keys that know dense gradients alone.
    """
    trained, roles = trained_in(parts), parts.split.roles
    tables = [t for t in trained if roles[t.holding.name].kind == "table"]
    if tables:
        _check_tables(run_file, tables[0].holding.name)
    return [t for t in trained if roles[t.holding.name].kind != "table"], tables


def with_tables(
    dense: Gradients,
    tables: Sequence[Trained],
    parts: Divided,
    *,
    groups: Groups,
    replica: Collective,
    ranks: GradientRanks,
) -> Gradients:
    """`dense`, and the gradients of `tables` beside it, where there are any: summed over `ranks`. Their norm adds up
    over `replica`.
    """
    if not tables:
        return dense
    assert isinstance(dense, VisibleGradients), "tables with a schedule by priority are refused"
    order = [trained.holding.name for trained in trained_in(parts)]
    return WithSparseRows(
        dense, tables, order=order, across=[groups(ranks(t.holding)) for t in tables], replica=replica
    )


def _check_tables(run_file: RunFile, name: str) -> None:
    """Raises `ConfigError` for keys that know dense gradients alone."""
    found = None
    if not run_file.sync.takes_sparse:
        found = f'sync.kind = "{run_file.sync.variant}"', '"allreduce", "server" or "hogwild"'
    elif run_file.gradients.schedule == "priority":
        found = 'gradients.schedule = "priority"', '"order"'
    elif run_file.observe.noise_every_steps:
        found = f"observe.noise_every_steps = {run_file.observe.noise_every_steps}", "0"
    if found is not None:
        raise ConfigError(
            f"{name} is the weight of an EmbeddingTable, whose gradient is sparse, and {found[0]} needs dense ones; "
            f"set it to {found[1]}, or use nn.Embedding"
        )


ZERO_OF_SHARD = 3
"""The stage of ZeRO over `layout.shard` if `memory.zero` is left out: everything is divided, as users of FSDP expect.
"""

SAME_LAYERS: tuple[Axis, ...] = ("replicate", "shard", "context", "tensor")
"""The axes of the ranks that hold the same layers."""

_NORM_AXES: Mapping[bool, tuple[Axis, ...]] = {
    False: ("pipeline", "shard", "context", "tensor"),
    True: ("shard", "context", "tensor"),
}
"""Whose gradients have one norm: those of a replica, or of one stage if stages are at different updates."""


def zero_of(memory: MemoryConfig, mesh: Mesh) -> int | None:
    """The stage of ZeRO; None if no rank shares its copy of the model with ranks that see other samples. Parameters
    that live on the host are gathered on one rank, too.
    """
    if memory.offload.parameters != "device":
        return ZERO_OF_SHARD
    return None if mesh.layout.shard == 1 else memory.zero or ZERO_OF_SHARD


def gathering_of(memory: MemoryConfig, parts: Divided, mesh: Mesh) -> tuple[bool, str] | None:
    """(whether blocks were found, a sentence of what ZeRO-3 gathers at a time); None where it gathers nothing."""
    if zero_of(memory, mesh) != 3:
        return None
    model = parts.split.model
    trained = trained_in(parts)
    blocks = blocks_in(model, parts.stages, mesh.layout.index("pipeline", mesh.rank))
    names = {id(module): name for name, module in model.named_modules()}
    own = [0] * len(blocks)
    for each, unit in zip(trained, units_of(trained, blocks, model), strict=True):
        if unit >= 0:
            own[unit] += each.parameter.numel()
    found = [names[id(block)] for block, numbers in zip(blocks, own, strict=True) if numbers]
    if not found:
        return False, (
            f"ZeRO-3 found no blocks in {type(model).__name__}, so all of its parameters are gathered at once and stay "
            "until the backward is over: hold its layers in an nn.ModuleList and call them as modules"
        )
    named = found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
    rest = 1 - sum(own) / max(1, sum(each.parameter.numel() for each in trained))
    return True, (
        f"ZeRO-3 gathers {units.plural(len(found), 'block')} ({named}) one after the other; the other "
        f"{max(0.0, rest):.0%} of the parameters stay from their first use until the backward is over"
    )


def build_run_gradients(
    run_file: RunFile,
    parts: Divided,
    mesh: Mesh,
    sync: Sync,
    *,
    exchange: NewExchange,
    partition: NewPartitionSum = AllReduce,
    one_host: bool,
    optimizers: Sequence[OwnOptimizer] = (),
    home: PieceHome | None = None,
) -> Gradients:
    """How this rank's gradients are reduced, and what its optimizer runs on. The parameters' memory may be moved, under
    ZeRO-3 to `home`, and becomes narrower where the optimizer runs on masters.

    Ranks that sum a gradient do so by `exchange`; under a schedule by priority, by `partition`. `one_host`: all ranks
    are on one host. `optimizers` are a script's own; several have gradients apart.
    """
    config, (trained, tables) = run_file.gradients, dense_and_tables(run_file, parts)
    mixed = precision_of(run_file.precision).mixed
    if mixed is not None and tables:
        raise ConfigError(
            f"{tables[0].holding.name} is the weight of an EmbeddingTable, and there are no masters of single rows: "
            'use nn.Embedding, or set precision.kind = "bfloat16"'
        )
    if mixed is not None:
        trained = narrowed(parts.split.model, trained, mixed)
    if mesh.device.type == "cpu" and not one_host:
        config = config.between_hosts()
    if config.schedule == "priority":
        lane = mesh.axis("replicate", lane="gradients")
        return PriorityGradients(
            config,
            trained,
            model=parts.split.model,
            lane=lane,
            ledger=mesh.ledger,
            partition=partition,
            whole=run_file.codec.codes_matrices,
        )
    _check_separable(run_file, mesh, optimizers)
    blocks = blocks_in(parts.split.model, parts.stages, mesh.layout.index("pipeline", mesh.rank))
    replica, several = mesh.axis(*_NORM_AXES[run_file.pipeline.asynchronous]), len(optimizers) > 1
    if several and tables:
        raise ConfigError(
            f"{tables[0].holding.name} is the weight of an EmbeddingTable, which a loop with several optimizers does "
            "not serve; use nn.Embedding, or one optimizer"
        )

    def of(own: Sequence[Trained], works_on: Granularity, undivided: int = 1) -> Gradients:
        whole = works_on == "matrices" or run_file.codec.codes_matrices
        there = {id(each.parameter) for each in own}
        return build_gradients(
            config,
            own,
            zero=zero_of(run_file.memory, mesh),
            groups=mesh.ranks,
            replica=replica,
            model=parts.split.model,
            blocks=[block for block in blocks if not several or any(id(p) in there for p in block.parameters())],
            summing=Summing(
                sync.gradient_ranks,
                exchange,
                lockstep=None if several else mesh.axis(*sync.lockstep_axes),
                undivided=None if whole else max(undivided, ALIGNMENT),
                pieces=replace(piece_codecs(run_file.shard_codec), home=home),
            ),
        )

    if not several:
        own = run_file.optimizer
        dense = of(trained, optimizers[0].works_on) if optimizers else of(trained, own.needs, own.undivided)
        return with_tables(dense, tables, parts, groups=mesh.ranks, replica=replica, ranks=sync.gradient_ranks)
    return JointGradients([of([t for t in trained if t.holding.name in set(o.names)], o.works_on) for o in optimizers])


def _check_separable(run_file: RunFile, mesh: Mesh, optimizers: Sequence[OwnOptimizer]) -> None:
    """Raises `ConfigError` where an optimizer that needs all gradients, or whole parameters, would get some of them."""
    stage = zero_of(run_file.memory, mesh)
    coupling = next((own.kind for own in optimizers if own.couples), None)
    if isinstance(run_file.optimizer, PythonOptimizer) and not optimizers:
        coupling = _checked(run_file.optimizer, mesh.layout)
    if coupling is not None and stage is not None:
        raise ConfigError(
            f"{coupling} computes its step from the gradients of all parameters together, and under memory.zero = "
            f"{stage} each rank has those of its own alone, so that the model would be another: set layout.shard to 1 "
            f"and layout.replicate to {mesh.layout.shard * mesh.layout.replicate}, where every rank has all of them"
        )


def _checked(optimizer: PythonOptimizer, layout: Layout) -> str | None:
    """The class that the run file names if it couples parameters, else None. Raises `ConfigError` where ranks of a
    replica have parts of what it wants whole.
    """
    known, said = asked(optimizer), f"optimizer.build = {optimizer.build!r}"
    axes = [axis for axis in ("tensor", "expert", "pipeline") if getattr(layout, axis) > 1]
    if axes and known.couples:
        raise ConfigError(
            f"{said} computes its step from the gradients of all parameters together, of which ranks of "
            f"layout.{axes[0]} = {getattr(layout, axes[0])} have some: divide the batch alone, by layout.replicate"
        )
    if axes and axes[0] != "pipeline" and known.works_on == "matrices" and not known.sees_parts:
        raise ConfigError(
            f"{said} is taken for an optimizer of whole parameters, of which ranks of layout.{axes[0]} = "
            f"{getattr(layout, axes[0])} have parts: if it treats every number alone, write works_on = "
            '"elements" in the class, and prove it by shoal verify; else use layout.shard or layout.pipeline'
        )
    return said if known.couples else None


def parts_on(run_file: RunFile, owned: Sequence[Owned], mesh: Mesh, sync: Sync) -> Parts:
    """What this rank's optimizer steps, and with whom it makes up whole parameters, and equal updates.

    Replicas do not share work where each has a state of its own, where one may go on without another, or where updates
    are made one parameter after the other.
    """
    axes = _NORM_AXES[run_file.pipeline.asynchronous]
    shared = sync.keeps_replicas_equal and run_file.elastic is None and run_file.gradients.schedule != "priority"
    return Parts(owned, mesh.axis(*axes), mesh.axis("replicate", *axes) if shared else mesh.axis(*axes))
