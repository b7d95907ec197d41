"""From a run file to the `Task` of a federated run: model, data and loss as any run has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from shoal.engine.precision import precision_of
from shoal.errors import ConfigError, UserCodeError
from shoal.federated import report
from shoal.federated.local_training import LocalTrainer
from shoal.federated.privacy.dp_sgd import PrivateGradient
from shoal.federated.privacy.noise import Simulated, from_entropy
from shoal.federated.simulation import Simulation
from shoal.federated.task import Task
from shoal.federated.vector import layout_of, vector_of
from shoal.models.roles import roles_of
from shoal.optim.config import SGD
from shoal.optim.schedule import peak_rate, rate
from shoal.recipes.objects import UserObjects, data_of, loss_of, model_of
from shoal.runfile.run_file import RunFile, run_directory


def federated_task(run_file: RunFile, objects: UserObjects = UserObjects(), *, real: bool = False) -> Task:
    """Builds what clients train; `real` ones take their noise from the system's entropy.

    Raises `ConfigError` for a run file without `[federated]`, and `UserCodeError`.
    """
    if run_file.federated is None:
        raise ConfigError('the run file has no table [federated]: add it, with a strategy such as kind = "fedavg"')
    assert isinstance(run_file.optimizer, SGD), "a rule of the run file asks for it"
    model = model_of(run_file, objects, device=torch.device("cpu"), dtype=precision_of(run_file.precision).parameters)
    layout, data = layout_of(model), data_of(run_file, objects)
    if data.endless or data.parts:
        raise UserCodeError("federated training needs data with a number of samples, of one source: give such data")
    decays = _decays(model)
    private = None
    if run_file.privacy is not None and run_file.privacy.unit == "sample":
        source = from_entropy if real else Simulated(run_file.run.seed, "clients")
        private = PrivateGradient(run_file.privacy, batch=run_file.batch.global_samples, noise=source)
    trainer = LocalTrainer(
        module=model,
        loss=loss_of(run_file.loss, objects),
        layout=layout,
        sgd=run_file.optimizer,
        private=private,
        decays=torch.cat([torch.full((size,), decays[n]) for n, size in zip(layout.names, layout.sizes, strict=True)]),
    )
    peak, _ = peak_rate(run_file.optimizer, global_samples=run_file.batch.global_samples)
    return Task(
        trainer=trainer,
        model=vector_of(model, layout),
        data=data,
        denominator=run_file.batch.denominator,
        federated=run_file.federated,
        partition=run_file.partition,
        devices=run_file.devices,
        rate=lambda step: rate(run_file.schedule, peak, step=step, steps=run_file.run.steps),
        batch=run_file.batch.global_samples,
        rounds=run_file.run.steps,
        seed=run_file.run.seed,
        shuffle=run_file.data.shuffle,
        privacy=run_file.privacy,
        secure=run_file.secure_aggregation,
    )


def _decays(model: torch.nn.Module) -> dict[str, float]:
    return {name: float(role.decay) for name, role in roles_of(model).items()}


def simulate(
    run_file: RunFile, *, told: Callable[[str], object], objects: UserObjects = UserObjects()
) -> dict[str, Any]:
    """Plays all rounds; leaves the report and the model in the run directory. `told` hears a line for each round.

    Returns what the report says. Raises as `federated_task` and `Simulation.run`.
    """
    refused: list[str] = []
    simulation = Simulation(
        federated_task(run_file, objects), told=lambda s: (refused.append(s), told(f"refused: {s}"))
    )
    told(report.heading())
    began_s = time.perf_counter()
    rows = simulation.run(lambda row: told(report.line_of(row)))
    seconds = time.perf_counter() - began_s
    facts: dict[str, Any] = {
        "name": run_file.run.name,
        "strategy": simulation.task.federated.variant,
        "clients": simulation.task.federated.clients,
        "parameters": simulation.task.model.numel(),
        "updates_per_second": sum(row.counted for row in rows) / seconds,
    }
    if simulation.budget is not None:
        facts["privacy"] = simulation.budget.facts(simulation.server.version)
    result = report.result_of(rows, facts=facts, fairness=simulation.fairness(), refused=refused)
    directory = run_directory(run_file)
    report.write(directory, result, simulation.task.trainer.layout.views(simulation.server.model))
    told(f"{directory / report.REPORT} and {directory / report.WEIGHTS} are written")
    return result
