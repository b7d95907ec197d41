"""What training and evaluation have in common on one rank: its device, its wire, the model, the data and the loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch._C._distributed_c10d import Store

from shoal.comm.mesh import Mesh, build_mesh
from shoal.data.build import Dataset
from shoal.data.feed import evaluation_batches
from shoal.data.sample import Batch
from shoal.engine.evaluation import evaluate
from shoal.engine.microbatches import topped_up
from shoal.engine.passes import Passes
from shoal.engine.precision import Precision, precision_of
from shoal.errors import EnvironmentFault
from shoal.launch.environment import Place
from shoal.launch.rendezvous import STARTED, Rendezvous, interface_for, open_store
from shoal.observe.facts import read_facts
from shoal.recipes.lab import conditions_from
from shoal.recipes.microbatching import Microbatching, microbatching
from shoal.recipes.objects import Given, check_layout_independent, data_of, loss_of, model_of, skeleton_of
from shoal.recipes.sameness import require_same, samples_of, shapes_of
from shoal.recipes.splitting import Divided, divided, draw_parts, passes_of
from shoal.runfile.run_file import RunFile, run_directory, statistics_group
from shoal.sync.owned import Trained


@dataclass(frozen=True)
class Setting:
    """One rank, ready to compute. `announce(key, find)` gives every rank what rank 0 found."""

    run_file: RunFile
    place: Place
    store: Store
    mesh: Mesh
    device: torch.device
    precision: Precision
    model: nn.Module
    passes: Passes
    parts: Divided
    microbatching: Microbatching
    data: Dataset
    announce: Callable[[str, Callable[[], str]], str]

    @property
    def trained(self) -> list[Trained]:
        """The parameters that this rank trains, and where each stands in the unsplit model."""
        return [Trained(holding, p) for holding, p in self.parts.split.held if p.requires_grad]

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the unsplit model's trained parameters, tied ones once."""
        split = self.parts.split
        return {name: shape for name, shape in split.shapes.items() if name not in split.frozen}

    @property
    def group_samples(self) -> int:
        """Samples that are never parted, because the model takes statistics over them together."""
        return statistics_group(self.run_file)

    def held_out(self) -> Iterator[Batch]:
        """This rank's part of the held-out samples."""
        if self.data.held_out is None:
            return iter(())
        batch, (share, shares) = self.run_file.batch, self.mesh.batch_share
        source, limit = self.data.held_out, self.run_file.observe.evaluate_samples
        micro = self.microbatching.samples or max(1, batch.global_samples // shares)
        own = evaluation_batches(
            source, replicas=shares, replica=share, micro_samples=micro, denominator=batch.denominator, limit=limit
        )
        if self.microbatching.uniform is None:
            return own
        samples = len(source) if limit is None else min(limit, len(source))
        first = evaluation_batches(source, replicas=1, replica=0, micro_samples=1, denominator=batch.denominator)
        return topped_up(own, -(-samples // (shares * micro)), spare=lambda: next(first))

    def evaluate(self) -> dict[str, float]:
        """The measurements on the held-out data; none where there is no such data."""
        return evaluate(self.passes, self.held_out(), group=self.mesh.world, device=self.device)


def set_up(
    run_file: RunFile,
    place: Place,
    given: Given,
    *,
    environ: Mapping[str, str] = os.environ,
    store: Store | None = None,
) -> Setting:
    """Connects this rank to the others and builds what it computes with. Blocks until all ranks are here.

    `store` is where they meet; None: the one that the launcher told of.
    """
    device = device_of(run_file, place)
    _share_host(place, environ)
    if store is None:
        store = open_store(place, environ, timeout_s=run_file.run.start_timeout_s)
    start = Rendezvous(store, place, timeout_s=run_file.run.start_timeout_s)
    announce = start.announce
    layout = run_file.layout.layout(place.world_size)
    precision = precision_of(run_file.precision)
    skeleton = skeleton_of(run_file, given)
    model = skeleton or model_of(run_file, given, device=device, dtype=precision.parameters)
    plan = microbatching(run_file, layout)
    check_layout_independent(model, run_file, shares=layout.replicate * layout.shard, micro_samples=plan.samples)
    loss, data = loss_of(run_file, given), data_of(run_file, given, environ)
    require_same(place.rank, announce, {"model": shapes_of(model), "data": samples_of(data)})
    generation = int(announce("generation", lambda: str(read_facts(run_directory(run_file)).get("generation", -1) + 1)))
    start.barrier(STARTED)
    mesh = build_mesh(
        layout, place.rank, store=store, device=device, generation=generation, wire=run_file.wire,
        conditions=conditions_from(environ),
    )  # fmt: skip
    if skeleton is None:
        _start_equal(model, mesh)
    parts = divided(run_file, model, mesh, in_flight=plan.in_flight)
    if skeleton is not None:
        draw_parts(parts.split, seed=run_file.run.seed, device=device, dtype=precision.parameters)
    if run_file.run.compile:
        model.compile()
    passes = passes_of(run_file, parts, mesh, loss=loss, precision=precision, microbatching=plan)
    return Setting(run_file, place, store, mesh, device, precision, model, passes, parts, plan, data, announce)


def device_of(run_file: RunFile, place: Place) -> torch.device:
    """The device of this rank. Raises `EnvironmentFault` where GPUs were asked for and there are too few."""
    wanted = run_file.run.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if there == 1 and place.launcher == "slurm":  # it shows each task its own GPU alone
        return torch.device("cuda", 0)
    if place.local_rank >= there:
        raise EnvironmentFault(
            f"{place.local_world_size} ranks on this host, but {there} GPUs; start one a GPU, or set run.device=cpu"
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def _share_host(place: Place, environ: Mapping[str, str]) -> None:
    """Ranks of one host talk over loopback and share its cores: more threads than cores make every rank slower."""
    interface_for(place, os.environ)
    if "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))


def _start_equal(model: nn.Module, mesh: Mesh) -> None:
    """Everybody takes rank 0's parameters and buffers: a user's module may have been drawn from anything."""
    if mesh.world.size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.data.contiguous()
            mesh.world.broadcast(torch.view_as_real(whole) if whole.is_complex() else whole, root=0).wait()
            tensor.data.copy_(whole)
