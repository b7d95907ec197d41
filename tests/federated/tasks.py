"""Small tasks that the tests of this room train."""

from __future__ import annotations

from typing import Any

import torch

from shoal.assembly.federated import federated_task
from shoal.federated.task import Task
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile

TABLES: dict[str, Any] = {
    "run": {"name": "example", "steps": 5, "seed": 3},
    "model": {"kind": "mlp", "inputs": 64, "hidden": [], "outputs": 10},
    "data": {"kind": "digits"},
    "batch": {"global_samples": 16},
    "optimizer": {"kind": "sgd", "lr": 0.1},
    "schedule": {"kind": "constant"},
    "federated": {"kind": "fedavg", "clients": 8, "local_steps": 3},
}


def run_file(**tables: dict[str, Any]) -> RunFile:
    """The run file above with other keys; a table `None` is left out."""
    merged = {name: dict(table) for name, table in TABLES.items()}
    for name, keys in tables.items():
        merged[name] = {**merged.get(name, {}), **keys}
    return run_file_of(merged, file="test")


def task(**tables: dict[str, Any]) -> Task:
    """What clients train under that run file."""
    torch.set_num_threads(1)
    return federated_task(run_file(**tables))
