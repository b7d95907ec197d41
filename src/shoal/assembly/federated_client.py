"""A client of a federated run over the network: one process, or rank 0 of a whole replica."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from msgspec.structs import replace as replace_table
from torch._C._distributed_c10d import Store

from shoal.assembly.federated import FromScript, at_width, federated_task
from shoal.assembly.federated_replica import ReplicaRanks
from shoal.assembly.objects import UserObjects
from shoal.assembly.run import Run, open_run
from shoal.codec.config import NoCodec
from shoal.engine.recovery import load_weights
from shoal.errors import ConfigError, UsageError
from shoal.federated.client_data import ClientData
from shoal.federated.config import FederatedClient
from shoal.federated.privacy.accountants import sample_budget
from shoal.federated.simulation import data_for, shards_of
from shoal.federated.task import Task
from shoal.launcher.environment import ALONE, Place, place_from
from shoal.launcher.lock import RunLock
from shoal.launcher.supervision import Patience
from shoal.runfile.federated_rules import is_replica, ranks_of, require_client, without_clients
from shoal.runfile.run_file import RunFile, run_directory

CLIENT = Patience(doing="ending the ranks", then="the same command goes on from the last contribution that counted")
"""Of a client's ranks, which keep what the client keeps."""


def client_directory(run_file: RunFile, client: FederatedClient) -> Path:
    """The client's own folder: what it keeps between rounds, and the logs of its ranks."""
    return run_directory(run_file) / "clients" / client.name


def replica_of(
    run_file: RunFile,
    client: FederatedClient,
    script: FromScript = FromScript(),
    *,
    environ: Mapping[str, str] = os.environ,
) -> RunFile | None:
    """The run that a client of several ranks trains with, or of one on a GPU; None: the client is one process on CPU.
    Ranks that a launcher has started, such as torchrun, are one client.

    Raises `ConfigError` for what such a client cannot do, and `UsageError` for a client that the run has not.
    """
    started = (place_from(environ) or ALONE).world_size
    require_client(run_file, client, started)
    if not is_replica(run_file, started):
        return None
    ranks = ranks_of(run_file, started)
    if script.own.train is not None:
        raise ConfigError(
            f"an own train function on a client of {ranks} ranks: it trains a whole model in one process; leave train "
            "out, or start one process"
        )
    run = replace_table(
        run_file.run, processes=run_file.run.processes or ranks, directory=str(client_directory(run_file, client))
    )
    return replace_table(without_clients(run_file), run=run, codec=NoCodec())  # `[codec]` is of uploads


def take_part(
    run_file: RunFile, client: FederatedClient, *, told: Callable[[str], object], script: FromScript = FromScript()
) -> None:
    """Trains in this process until the run is over.

    Raises `EnvironmentFault` where the server is away for `patience_s`, `UsageError` where it refuses the client, and
    `InUse` where the client runs already.
    """
    task = _task(run_file, client, script)
    with RunLock(client_directory(run_file, client)):
        _speak(run_file, client, task, told=told)


def take_part_as_rank(
    run_file: RunFile,
    client: FederatedClient,
    replica: RunFile,
    place: Place,
    *,
    told: Callable[[str], object],
    script: FromScript = FromScript(),
) -> None:
    """The same as one rank of the run `replica` (see `replica_of`). Also raises `CollectiveError`."""
    task = _task(run_file, client, script) if place.rank == 0 else None
    run = open_replica(run_file, client, replica, place, script.objects)  # behind the task: it changes a given module
    ranks = ReplicaRanks(run)
    with run.default_group():
        if task is None:
            ranks.follow()
        else:
            told(f"trains on {run.mesh.layout.describe()}")
            _speak(run_file, client, task.trained_by(ranks), told=told)
            ranks.dismiss()
        run.settle()
    run.end()


def open_replica(
    run_file: RunFile,
    client: FederatedClient,
    replica: RunFile,
    place: Place,
    objects: UserObjects,
    *,
    store: Store | None = None,
) -> Run:
    """This rank's run of the client's model, built at the client's width where the run has several. Weights that do not
    train, which no server sends, are those of `run.warm_start`. Blocks until all ranks are here. Raises as `open_run`,
    and `UsageError` for weights of another model."""
    assert run_file.federated is not None
    if len(run_file.federated.all_widths) > 1:
        replica, objects = at_width(replica, objects, client.width)
    run = open_run(replica, place, objects, store=store)
    source = replica.run.warm_start
    if source is not None and run.generation.parts.split.frozen and client.width == 1:
        repair = "Let run.warm_start name a checkpoint of this model, or leave the key out"
        load_weights(run.state, Path(source), announce=run.process.announce, repair=repair)
    return run


def _task(run_file: RunFile, client: FederatedClient, script: FromScript) -> Task:
    """What the client trains. Raises `UsageError` before anything is built where its certificate is not there."""
    from shoal.federated.transport.enrol import tls_context

    tls_context(Path(client.certificates), client.name, server=False)
    return federated_task(run_file, script, real=True)


def _speak(run_file: RunFile, client: FederatedClient, task: Task, *, told: Callable[[str], object]) -> None:
    from shoal.federated.transport.client import Client
    from shoal.federated.transport.enrol import tls_context
    from shoal.federated.transport.store import ClientStore

    speaks = Client(
        task,
        _data(task, client.part),
        name=client.name,
        url=f"https://{client.server}",
        store=ClientStore(client_directory(run_file, client)),
        width=task.federated.all_widths.index(client.width),
        patience_s=client.patience_s,
        told=told,
    )
    asyncio.run(speaks.run(tls_context(Path(client.certificates), client.name, server=False)))


def _data(task: Task, part: int | None) -> ClientData:
    ids = np.arange(len(task.data.train), dtype=np.int64) if part is None else shards_of(task)[part]
    private = task.privacy is not None and task.privacy.unit == "sample"
    seed = secrets.randbits(62) if private else task.seed + (part or 0)  # who is in a batch is part of the secret
    data = data_for(task, ids, seed=seed)
    if task.privacy is not None and private:
        steps = data.steps(task.federated, task.batch)
        budget = sample_budget(task.privacy, batch=task.batch, samples=len(data), steps=steps)
        if budget.rounds(task.rounds) < task.rounds:
            raise UsageError(
                f"{len(data)} samples in {task.rounds} rounds would spend epsilon {budget.spent(task.rounds):.3g}, and "
                f"privacy.epsilon is {task.privacy.epsilon:g}: lower run.steps, or raise privacy.noise"
            )
    return data
