"""From a run file to the `Task` of a federated run: model, data and loss as any run has them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace as replace_table

from shoal.assembly.objects import UserObjects, data_of, loss_of, model_of
from shoal.checkpoint.weights import copy_weights, require_weights_of, weights_of
from shoal.data.labelled import predicts_next_token, with_labels
from shoal.engine.precision import precision_of
from shoal.errors import ConfigError, EnvironmentFault, UserCodeError
from shoal.federated import report
from shoal.federated.local_training import LocalTrainer
from shoal.federated.page import PAGE
from shoal.federated.privacy.mechanisms import PrivateGradient, Simulated, from_entropy
from shoal.federated.simulation import Simulation
from shoal.federated.task import Corner, OwnTraining, Task
from shoal.federated.vector import copy_frozen, corner_of, layout_of, upload_of, vector_of
from shoal.files import refused_file
from shoal.launcher.lock import RunLock
from shoal.models.config import ConvNetConfig, MLPConfig, PythonModel
from shoal.models.roles import roles_of
from shoal.optim.config import SGD
from shoal.optim.schedule import peak_rate, rate
from shoal.runfile.federated_rules import NO_TABLE, OF_ONE_WIDTH
from shoal.runfile.run_file import RunFile, run_directory


@dataclass(frozen=True)
class FromScript:
    """What a script hands over: model, data and loss in the place of the run file's, and functions of its own."""

    objects: UserObjects = field(default_factory=UserObjects)
    own: OwnTraining = field(default_factory=OwnTraining)


def federated_task(run_file: RunFile, script: FromScript = FromScript(), *, real: bool = False) -> Task:
    """Builds what clients train; `real` ones take their noise from the system's entropy.

    Raises `ConfigError` for a run file without `[federated]`, and `UserCodeError`.
    """
    if run_file.federated is None:
        raise ConfigError(NO_TABLE)
    assert isinstance(run_file.optimizer, SGD), "a rule of the run file asks for it"
    secure = run_file.secure_aggregation is not None
    script.own.require_possible(run_file.federated, run_file.privacy, secure=secure)
    widths, objects = run_file.federated.all_widths, script.objects
    model = _whole_model(run_file, objects, real=real)
    layout = layout_of(model)
    data = with_labels(data_of(run_file, objects), next_token=predicts_next_token(model))
    if data.endless or data.parts:
        raise UserCodeError("federated training needs data with a number of samples, of one source: give such data")
    decays = _decays(model)
    trainer = LocalTrainer(
        module=model,
        loss=loss_of(run_file.loss, objects, precision_of(run_file.precision)),
        layout=layout,
        sgd=run_file.optimizer,
        private=_private(run_file, real=real),
        decays=torch.cat([torch.full((size,), decays[n]) for n, size in zip(layout.names, layout.sizes, strict=True)]),
    )
    peak, _ = peak_rate(run_file.optimizer, global_samples=run_file.batch.global_samples)
    task = Task(
        trainer=trainer,
        model=vector_of(model, layout),
        data=data,
        denominator=run_file.batch.denominator,
        federated=run_file.federated,
        partition=run_file.partition,
        devices=run_file.devices,
        rate=functools.cache(lambda step: rate(run_file.schedule, peak, step=step, steps=run_file.run.steps)),
        batch=run_file.batch.global_samples,
        rounds=run_file.run.steps,
        seed=run_file.run.seed,
        upload=upload_of(run_file.codec, numel=layout.numel, dtype=_dtype(run_file), seed=run_file.run.seed),
        shuffle=run_file.data.shuffle,
        privacy=run_file.privacy,
        secure=run_file.secure_aggregation,
        own=script.own,
        others=_others(run_file, objects),
    )
    narrower = [_corner(task, *at_width(run_file, objects, width)) for width in widths[1:]]
    return replace(task, corners=narrower)


def _dtype(run_file: RunFile) -> torch.dtype:
    return precision_of(run_file.precision).parameters


def _whole_model(run_file: RunFile, objects: UserObjects, *, real: bool) -> torch.nn.Module:
    """The model of the largest width, on the CPU, with the weights that the run begins with."""
    assert run_file.federated is not None
    several = len(run_file.federated.all_widths) > 1
    whole = at_width(run_file, objects, 1.0) if several else (run_file, objects)
    model = model_of(*whole, device=torch.device("cpu"), dtype=_dtype(run_file))
    sent = real and all(parameter.requires_grad for parameter in model.parameters())  # a server sends what trains
    if run_file.run.warm_start is not None and not sent:
        source = Path(run_file.run.warm_start)
        weights = weights_of(source)
        require_weights_of(model, weights, source=source)
        copy_weights(weights, model)
    return model


def _private(run_file: RunFile, *, real: bool) -> PrivateGradient | None:
    """How clients keep single samples private, where `[privacy]` asks for that."""
    if run_file.privacy is None or run_file.privacy.unit != "sample":
        return None
    source = from_entropy if real else Simulated(run_file.run.seed, "clients")
    return PrivateGradient(run_file.privacy, batch=run_file.batch.global_samples, noise=source)


def _corner(task: Task, run_file: RunFile, objects: UserObjects) -> Corner:
    """The model of a smaller width, whose parameters are corners of the whole one's. Raises `ConfigError`."""
    dtype = _dtype(run_file)
    model = model_of(run_file, objects, device=torch.device("cpu"), dtype=dtype)
    layout, whole = layout_of(model), task.trainer.layout
    where = corner_of(whole, layout)
    copy_frozen(task.trainer.module, model)
    trainer = replace(task.trainer, module=model, layout=layout, decays=task.trainer.decays[where])
    upload = upload_of(run_file.codec, numel=layout.numel, dtype=dtype, seed=task.seed)
    return Corner(replace(task, trainer=trainer, model=task.model[where], upload=upload), where)


def at_width(run_file: RunFile, objects: UserObjects, width: float) -> tuple[RunFile, UserObjects]:
    """The run file and the script's objects, whose model has hidden layers of this part of the whole width. Raises
    `ConfigError` for a model that cannot be built so."""
    model, given = run_file.model, objects.model
    if callable(given) and not isinstance(given, torch.nn.Module) and "width" in inspect.signature(given).parameters:
        return run_file, replace(objects, model=functools.partial(given, width=width))
    if given is None and isinstance(model, MLPConfig):
        model = replace_table(model, hidden=tuple(math.ceil(width * features) for features in model.hidden))
    elif given is None and isinstance(model, ConvNetConfig):
        model = replace_table(model, width=math.ceil(width * model.width))
    elif given is None and isinstance(model, PythonModel):
        model = replace_table(model, arguments={**model.arguments, "width": width})
    else:
        raise ConfigError(f'federated.kind = "heterofl" with the model that was given: {OF_ONE_WIDTH}')
    return replace_table(run_file, model=model), objects


def _others(run_file: RunFile, objects: UserObjects) -> torch.Tensor | None:
    """What the further models of clusters begin from: other draws than the first. Raises `ConfigError` where a model
    begins from no draw."""
    assert run_file.federated is not None
    if run_file.federated.models == 1:
        return None
    vectors = []
    for number in range(run_file.federated.models):
        seeded = replace_table(run_file, run=replace_table(run_file.run, seed=run_file.run.seed + number))
        model = model_of(seeded, objects, device=torch.device("cpu"), dtype=precision_of(run_file.precision).parameters)
        vectors.append(vector_of(model, layout_of(model)))
    if any(torch.equal(vectors[0], other) for other in vectors[1:]):
        raise ConfigError(
            'federated.kind = "clustered" with a model that begins the same whatever the seed: all clients would train '
            "the first; give the model's class, or a function that builds it"
        )
    return torch.cat(vectors[1:])


def _decays(model: torch.nn.Module) -> dict[str, float]:
    return {name: float(role.decay) for name, role in roles_of(model).items()}


def simulate(run_file: RunFile, *, told: Callable[[str], object], script: FromScript = FromScript()) -> dict[str, Any]:
    """Plays all rounds; leaves the report and the model in the run directory. `told` hears a line for each round.

    Returns what the report says. Raises as `federated_task` and `Simulation.run`; and before the first round
    `EnvironmentFault` where nothing can be written in the run directory, or another run has it.
    """
    task = federated_task(run_file, script)
    with RunLock(run_directory(run_file)):
        return _played(run_file, task, told=told)


def _played(run_file: RunFile, task: Task, *, told: Callable[[str], object]) -> dict[str, Any]:
    refused: list[str] = []
    simulation = Simulation(task, told=lambda s: (refused.append(s), told(f"refused: {s}")))
    told(report.heading())
    began_s = time.perf_counter()
    rows = simulation.run(lambda row: told(report.line_of(row)))
    seconds = time.perf_counter() - began_s
    facts: dict[str, Any] = {
        "name": run_file.run.name,
        "strategy": simulation.task.federated.variant,
        "clients_enrolled": simulation.task.federated.clients,
        "parameters": simulation.task.model.numel(),
        "updates_per_second": sum(row.counted for row in rows) / seconds,
    }
    if simulation.budget is not None:
        facts["privacy"] = simulation.budget.facts(simulation.server.version)
    result = report.result_of(rows, facts=facts, clients=simulation.clients(), refused=refused)
    directory = run_directory(run_file)
    report.write(directory, result, simulation.server.parameters())
    told(f"{directory / PAGE}, {directory / report.REPORT} and {directory / report.WEIGHTS} are written")
    return result


def serve(
    run_file: RunFile,
    *,
    certificates: Path,
    address: str,
    port: int,
    listening: Callable[[int], object],
    told: Callable[[str], object],
    script: FromScript = FromScript(),
    enrolment: bool = False,
) -> dict[str, Any]:
    """Serves all rounds to clients; leaves the report and the model in the run directory, and returns the report. With
    `enrolment`, clients that have a token get certificates of the authority whose key is in `certificates`.

    Started again after any end, it goes on where it was. Raises `InUse` where another server has the run directory or
    the port, and `EnvironmentFault` where the disk refuses a file.
    """
    from shoal.federated.transport.enrol import SERVER, require_authority, tls_context
    from shoal.federated.transport.host import Host
    from shoal.federated.transport.service import Service
    from shoal.federated.transport.store import Store

    tls = tls_context(certificates, SERVER, server=True, anybody=enrolment)
    if enrolment:
        require_authority(certificates)
    directory, refused = run_directory(run_file), []

    def say(sentence: str) -> None:
        refused.append(sentence)
        told(sentence)

    host = Host(federated_task(run_file, script), Store(directory / "federated"), clock=time.monotonic, told=say)
    try:
        told(report.heading())
        folder = certificates if enrolment else None
        service = Service(host, on_round=lambda row: told(report.line_of(row)), said=told, enrolment=folder)
        asyncio.run(service.run(tls, address=address, port=port, listening=listening))
        rows = [report.row_of(row) for row in host.store.rows()]
    except OSError as error:
        if (fault := refused_file(error)) is None:
            raise
        sentence = f"{host.store.directory}, where the server keeps its rounds: {fault}"
        raise EnvironmentFault(f"{sentence}. The same command goes on with round {host.server.version + 1}") from error
    finally:
        host.close()
    facts = {"name": run_file.run.name, "strategy": host.task.federated.variant, **host.facts()}
    facts["clients_enrolled"] = host.task.federated.clients
    result = report.result_of(rows, facts=facts, clients=host.clients(), refused=refused)
    report.write(directory, result, host.server.parameters())
    told(f"{directory / PAGE}, {directory / report.REPORT} and {directory / report.WEIGHTS} are written")
    return result
