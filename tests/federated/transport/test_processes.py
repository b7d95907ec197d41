"""Real processes: `shoal federate server` and its clients, killed and started again."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from shoal.assembly.federated import federated_task
from shoal.federated.simulation import Simulation, client_name
from shoal.federated.transport.enrol import enrol
from shoal.runfile.load import load_run
from tests import programs
from tests.federated.tasks import TABLES
from tests.ports import free_port
from tests.programs import Program
from tests.waiting import HANG_S, wait_until

CLIENTS, ROUNDS = 3, 3
CLOSE = {"rtol": 0.0, "atol": 2e-5}


@dataclass
class Place:
    """A folder with a run file and certificates, and the processes that were started in it."""

    folder: Path
    port: int = field(default_factory=free_port)
    programs: list[Program] = field(default_factory=list)

    def write(self, **tables: dict) -> None:
        federated = {"clients": CLIENTS, "local_steps": 2, "deadline_s": 60.0, "evaluate_every": 9, "least": CLIENTS}
        run = {"name": "run", "steps": ROUNDS, "seed": 3}
        merged = {**TABLES, "run": run, "federated": {"kind": "fedavg", **federated}, "devices": {"together": 1}}
        (self.folder / "run.toml").write_text(tomli_w.dumps({**merged, **tables}))
        names = [client_name(number) for number in range(CLIENTS)]
        enrol(self.folder / "certificates", names=names, hosts=["127.0.0.1"])

    def start(self, log: str, *arguments: str) -> Program:
        command = [
            "-m",
            "shoal",
            "federate",
            arguments[0],
            "run.toml",
            "--certificates",
            "certificates",
            *arguments[1:],
        ]
        path = self.folder / log
        program = programs.start(command, cwd=self.folder, env=os.environ, stdout=path, stderr=path)
        self.programs.append(program)
        return program

    def server(self) -> Program:
        return self.start(f"server-{len(self.programs)}.log", "server", "--port", str(self.port))

    def client(self, number: int) -> Program:
        log = f"client-{number}-{len(self.programs)}.log"
        name, where = client_name(number), f"127.0.0.1:{self.port}"
        return self.start(log, "client", "--server", where, "--name", name, "--part", str(number))

    def said(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def rounds(self) -> int:
        """Models that servers have said are made."""
        return len(set(re.findall(r"^ +(\d+) +[\d.]+ s", self.said(), flags=re.MULTILINE)))


@pytest.fixture
def place(tmp_path: Path):
    one = Place(tmp_path)
    yield one
    for program in one.programs:
        program.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables", [{}, pytest.param({"secure_aggregation": {}}, marks=pytest.mark.stress)], ids=["clear", "secret"]
)
def test_kills_of_the_server_and_of_a_client_change_no_sum(tables: dict, place: Place) -> None:
    """After the first model the server is killed and started again, then a client: the last model is that of the
    simulation, in which nobody dies. No process is left over."""
    place.write(**tables)
    server = place.server()
    clients = [place.client(number) for number in range(CLIENTS)]
    wait_until(lambda: place.rounds() >= 1, place.said)
    server.kill()
    server.wait()
    server = place.server()
    wait_until(lambda: place.rounds() >= 2, place.said)
    clients[1].kill()
    clients[1].wait()
    clients[1] = place.client(1)
    assert [program.wait(HANG_S) for program in (server, *clients)] == [0] * (1 + CLIENTS), place.said()
    simulation = Simulation(federated_task(load_run(place.folder / "run.toml")))
    simulation.run()
    found = load_file(place.folder / "runs/run/model.safetensors")
    expected = simulation.task.trainer.layout.views(simulation.server.model)
    if "passes without an update" not in place.said():
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, **CLOSE), place.said()
