"""The jobs of `benchmarks.random_restarts`: what each one's programs are given, and what it promises.

Their training waits a tenth of a second in each step, in the place of a device's work, so that a fault may fall at any
point of a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from shoal.federated.simulation import client_name
from shoal.federated.transport.enrol import enrol
from tests.ports import free_port

TIMEOUT_S = 8.0
"""Of a collective: stops are shorter and longer than that."""
STEPS, EVERY, CLIENTS, ROUNDS = 24, 4, 2, 6
FAULTS = ("kill", "stop", "cut", "full")
RUNS = "runs"
"""The folder of all run directories."""

SCRIPT = """
import json, sys, time
import torch
import torch.nn.functional as F
from torch import nn
import shoal

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(288, 2), torch.randn(288, 4))
g = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
d = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.LeakyReLU(0.2), nn.Linear(8, 1))
first, second = torch.optim.Adam(g.parameters(), lr=1e-2), torch.optim.SGD(d.parameters(), lr=1e-1, momentum=0.9)
run = shoal.start(json.loads(sys.argv[1]), model=(g, d), optimizer=(first, second), data=data)
for number, microbatches in run.steps():
    for real, noise in microbatches:
        fooling = F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean()
        run.backward(fooling, optimizer=second)
    second.step(); second.zero_grad()
    for real, noise in microbatches:
        run.backward(F.softplus(-d(g(noise))).mean(), optimizer=first)
    first.step(); first.zero_grad()
    time.sleep(0.1)
"""

OWN = ("model", "data", "optimizer")
"""Tables of what a script builds itself."""

TRAINING: dict[str, Any] = {
    "run": {"name": "run", "steps": STEPS, "directory": f"{RUNS}/run", "processes": 2},
    "model": {"kind": "python", "build": "benchmarks.random_faults_job:model"},
    "data": {"kind": "python", "build": "benchmarks.random_faults_job:data"},
    "batch": {"global_samples": 12},
    "optimizer": {"kind": "adamw", "lr": 0.001},
    "checkpoint": {"every_steps": EVERY},
    "wire": {"timeout_s": TIMEOUT_S},
    "observe": {"report": False, "sample_bytes": 0},
}
FEDERATED: dict[str, Any] = {
    "run": {"name": "run", "steps": ROUNDS, "seed": 3},
    "model": {"kind": "mlp", "inputs": 64, "hidden": [], "outputs": 10},
    "data": {"kind": "digits"},
    "batch": {"global_samples": 16},
    "optimizer": {"kind": "sgd", "lr": 0.1},
    "schedule": {"kind": "constant"},
    "federated": {"kind": "fedavg", "clients": CLIENTS, "least": CLIENTS, "local_steps": 20, "deadline_s": 20.0},
}

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Job:
    """`programs(folder, tables)` writes what the programs read, and returns what a Python is given, for each by its
    name; `bits`: whether it promises those of the undisturbed job after any fault. `moves`: each start finds an empty
    run directory.
    """

    programs: Callable[[Path, Tables], dict[str, list[str]]]
    tables: Tables = field(default_factory=dict)
    bits: bool = True
    moves: bool = False
    faults: Sequence[str] = FAULTS


def _train(folder: Path, tables: Tables) -> dict[str, list[str]]:
    _write(folder, TRAINING, tables)
    return {"train": ["-m", "shoal", "train", "run.toml"]}


def _rehearse(folder: Path, tables: Tables) -> dict[str, list[str]]:
    _write(folder, TRAINING, tables)
    return {"rehearse": ["-m", "shoal", "rehearse", "run.toml", "--faults", "optimizer"]}


def _own_loop(folder: Path, tables: Tables) -> dict[str, list[str]]:
    (folder / "loop.py").write_text(SCRIPT)
    own = {
        name: table for name, table in _merged(TRAINING, tables).items() if name not in ("model", "data", "optimizer")
    }
    return {"script": ["loop.py", json.dumps(own)]}


def _federated(folder: Path, tables: Tables) -> dict[str, list[str]]:
    _write(folder, FEDERATED, tables)
    names, port = [client_name(number) for number in range(CLIENTS)], free_port()
    enrol(folder / "certificates", names=names, hosts=["127.0.0.1"])
    common = ["run.toml", "--certificates", "certificates"]
    where = ["--server", f"127.0.0.1:{port}"]
    clients = {
        name: ["-m", "shoal", "federate", "client", *common, *where, "--name", name, "--part", str(number)]
        for number, name in enumerate(names)
    }
    return {"server": ["-m", "shoal", "federate", "server", *common, "--port", str(port)], **clients}


def _merged(tables: Tables, over: Tables) -> dict[str, dict[str, Any]]:
    return {name: {**tables.get(name, {}), **over.get(name, {})} for name in [*tables, *(set(over) - set(tables))]}


def _write(folder: Path, tables: Tables, over: Tables) -> None:
    (folder / "run.toml").write_text(tomli_w.dumps(_merged(tables, over)))


def _served(**keys: Any) -> Tables:
    return {"run": {"processes": 3}, "sync": {"kind": "server", "servers": 1, "period": EVERY, **keys}}


JOBS = {
    "train": Job(_train, {"layout": {"shard": 2}, "memory": {"zero": 1}, "wire": {"transport": "gloo"}}),
    "server": Job(_train, _served()),
    "bounded": Job(_train, _served(admission="bounded", bound=2), bits=False),
    "backup": Job(_train, _served(admission="backup", backup=1), bits=False),
    "own-loop": Job(_own_loop),
    "remote": Job(_train, {"checkpoint": {"remote": "s3://copies/run"}}, moves=True),
    "elastic": Job(
        _train,
        {"sync": {"order": "canonical", "logical_shards": 4}, "elastic": {"min": 1, "max": 2, "silence_s": TIMEOUT_S}},
    ),
    "federated": Job(_federated),
    "secret": Job(_federated, {"secure_aggregation": {}}, bits=False),
    "rehearse": Job(_rehearse, bits=False, faults=("kill", "stop", "cut")),
}
