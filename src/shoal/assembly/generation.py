"""`Generation`: what a rank has for as long as the membership lasts, and how it is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.assembly.coding import check_shrinks, coded_exchanges
from shoal.assembly.first_values import fill_owned, place_and_fill, rows_of
from shoal.assembly.own_split import OwnSplit
from shoal.assembly.process import Process
from shoal.assembly.run_gradients import build_run_gradients, zero_of
from shoal.assembly.sparse import packed_exchange
from shoal.assembly.splitting import Divided, Microbatching, build_forward_backward, compiled, divided, trained_in
from shoal.assembly.workload import Workload
from shoal.comm.exchanges.coded import CodedExchanges
from shoal.comm.exchanges.exchange import AllReduce, PieceHome
from shoal.comm.mesh import Mesh
from shoal.engine.batch_statistics import connect_norms
from shoal.engine.forward_backward import ForwardBackward
from shoal.errors import ConfigError
from shoal.gradients.gradients import Gradients
from shoal.gradients.split_shells import script_parameters
from shoal.models.config import ForeignModel
from shoal.models.roles import tables_in
from shoal.observe.facts import read_facts
from shoal.optim.adopt import OwnOptimizer
from shoal.runfile.run_file import RunFile, run_directory, synchronises_norms
from shoal.sparsity.masks import Masks
from shoal.state import Trained
from shoal.sync.event_order import Rounds
from shoal.sync.strategy import Agreement, Replica, Sync, build_sync


@dataclass(frozen=True)
class Generation:
    """What stands on one membership: a change of it makes another one. `coded` makes exchanges with a codec; `masks`
    are those of `[sparsity]`, empty until something is masked.
    """

    mesh: Mesh
    parts: Divided
    microbatching: Microbatching
    forward_backward: ForwardBackward
    sync: Sync
    gradients: Gradients
    agreement: Agreement
    coded: CodedExchanges | None = None
    masks: Masks = field(default_factory=Masks)

    @property
    def trained(self) -> list[Trained]:
        """The parameters that this rank trains, and where each stands in the unsplit model."""
        return trained_in(self.parts)

    @property
    def seen(self) -> dict[str, nn.Parameter]:
        """The same as a script's own loop has them, by name."""
        return script_parameters(self.gradients, self.trained)

    @property
    def looks_up(self) -> bool:
        """Whether a forward asks servers for rows of tables, which they answer in their rounds alone."""
        return self.agreement.served is not None and bool(tables_in(self.parts.split.model))


def build_generation(
    run_file: RunFile,
    process: Process,
    workload: Workload,
    mesh: Mesh,
    plan: Microbatching,
    rounds: Rounds | None,
    home: PieceHome | None = None,
) -> Generation:
    """This rank's part of it. Blocks until all ranks of `mesh` are here; the model becomes a part of it. `home`: see
    `build_run_gradients`.
    """
    model, values = workload.model, workload.values
    _start_equal(model, mesh)
    split = OwnSplit(model, mesh, workload.precision) if workload.optimizers and mesh.layout.tensor > 1 else None
    parts = divided(run_file, model, mesh, in_flight=plan.in_flight)
    parts = parts if split is None else split.cut(parts)
    in_pieces = zero_of(run_file.memory, mesh) == 3 and not workload.optimizers
    if values is not None:
        place_and_fill(values, parts.split, mesh, workload.dtype, in_pieces=in_pieces)
    programs = compiled(run_file, parts, mesh, loss=workload.loss, own_loop=bool(workload.optimizers))
    if synchronises_norms(run_file.model):
        connect_norms(model, mesh.axis("replicate", "shard", lane="statistics"))
    forward_backward = build_forward_backward(
        run_file, parts, mesh, loss=workload.loss, precision=workload.precision, microbatching=plan,
        programs=programs, distillation=workload.distillation, own_loop=bool(workload.optimizers),
    )  # fmt: skip
    forward_backward.compute.randomness.seeds_host = (
        isinstance(run_file.model, ForeignModel) and not workload.data_draws
    )
    sync = build_sync(run_file.sync, mesh)
    if workload.optimizers and run_file.optimizer.sends_momentum:
        raise ConfigError(
            f'optimizer.kind = "{run_file.optimizer.variant}" with an optimizer of the script: '
            "ranks would send momenta that it takes for gradients; leave one of the two out"
        )
    coded, equal, masks = coded_exchanges(run_file, mesh, rounds), sync.keeps_replicas_equal, Masks()
    gradients = build_run_gradients(
        run_file,
        parts,
        mesh,
        sync,
        exchange=packed_exchange(run_file, parts, mesh, masks, (coded if equal else None) or sync.exchange),
        partition=AllReduce if coded is None else coded.partition,
        one_host=process.place.one_host,
        optimizers=workload.optimizers,
        home=home,
    )
    gradients = gradients if split is None else split.shown(gradients, parts)
    if values is not None:
        if in_pieces:
            fill_owned(values, parts.split, gradients.owned, mesh)
        values.close()
    agreement = _agreement(
        run_file,
        parts,
        gradients,
        sync,
        coded=None if equal else coded,
        rounds=rounds,
        optimizers=workload.optimizers,
    )
    check_shrinks(run_file, coded)
    return Generation(mesh, parts, plan, forward_backward, sync, gradients, agreement, coded, masks)


def _agreement(
    run_file: RunFile,
    parts: Divided,
    gradients: Gradients,
    sync: Sync,
    *,
    coded: CodedExchanges | None = None,
    rounds: Rounds | None = None,
    optimizers: Sequence[OwnOptimizer] = (),
) -> Agreement:
    """The running side of the strategy, on the parameters that this rank's optimizer updates.

    What replicas send each other, or servers, is `coded`; None: it is sent as it is. `rounds`: see `Replica`.
    `optimizers` are a script's own.
    """
    model = parts.split.model
    saved = model.state_dict(keep_vars=True)
    buffers = [b for name, b in model.named_buffers() if name in saved]
    needs = [optimizer.works_on for optimizer in optimizers] or [run_file.optimizer.needs]
    whole = (
        "matrices" in needs or run_file.optimizer.asks_for_whole
    )  # servers step what they hold, and know of no other parts
    return sync.agreement(
        Replica(
            gradients.owned,
            gradients.gather,
            [buffer for buffer in buffers if buffer.is_floating_point()],
            [buffer for buffer in buffers if not buffer.is_floating_point()],
            run_file.run.steps,
            whole,
            coded or AllReduce,
            rounds,
            {name: module for name, module in tables_in(model).items() if module.weight.requires_grad},
            None if coded is None else coded.pushes,
        )
    )


def _start_equal(model: nn.Module, mesh: Mesh) -> None:
    """Every rank takes rank 0's parameters and buffers: a user's module may have been drawn from anything.

    Some rows at a time, which are written where they differ: forked ranks share the memory of what none has written,
    and a model on the host need not fit into the device.
    """
    if mesh.world.size == 1:
        return
    with torch.no_grad():
        for tensor in (each.data for each in (*model.parameters(), *model.buffers()) if not each.is_meta):
            own = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            for box in rows_of(tuple(own.shape)):
                rows = own[box.slices]
                sent = rows.to(mesh.device, copy=True, memory_format=torch.contiguous_format)
                mesh.world.broadcast(sent, root=0).wait()
                sent = sent.to(rows.device)
                if not torch.equal(sent, rows):
                    rows.copy_(sent)


def next_generation(run_file: RunFile) -> int:
    """The number after that of the newest generation in the run directory."""
    return read_facts(run_directory(run_file)).get("generation", -1) + 1
