"""Real processes: `shoal federate server` and its clients, killed and started again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
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
        (self.folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(600)))
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

    def client(self, number: int, *keys: str) -> Program:
        log = f"client-{number}-{len(self.programs)}.log"
        name, where = client_name(number), f"127.0.0.1:{self.port}"
        return self.start(log, "client", *keys, "--server", where, "--name", name, "--part", str(number))

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
    require_simulated(place, server, *clients)


def require_simulated(place: Place, *running: Program) -> None:
    """All programs end well, and the last model is that of the simulation."""
    assert [program.wait(HANG_S) for program in running] == [0] * len(running), place.said()
    with contextlib.chdir(place.folder):
        simulation = Simulation(federated_task(load_run(Path("run.toml"))))
        simulation.run()
    found = load_file(place.folder / "runs/run/model.safetensors")
    expected = simulation.task.trainer.layout.views(simulation.server.model)
    if "passes without an update" not in place.said():
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, **CLOSE), place.said()


GPT = {
    "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2},
    "data": {"kind": "text", "files": ["text.txt"], "held_out_fraction": 0.0},
    "batch": {"global_samples": 8, "sequence": 16},
}
ZERO_3 = ("run.device=cpu", "layout.shard=2", "memory.zero=3")
TENSOR = ("run.device=cpu", "layout.tensor=2")


@pytest.mark.slow
@pytest.mark.parametrize("tables", [{}, {"secure_aggregation": {}}], ids=["clear", "secret"])
def test_clients_of_one_and_of_several_ranks_train_one_model(tables: dict, place: Place) -> None:
    """One process, two ranks under ZeRO-3 and two that split tensors: the model is that of three clients of one process
    each, and each client has sent one update a round."""
    place.write(**GPT, **tables)
    server = place.server()
    clients = [place.client(0), place.client(1, *ZERO_3), place.client(2, *TENSOR)]
    require_simulated(place, server, *clients)
    assert all(place.said().count(f"{client_name(n)}: round {ROUNDS}: counted") == 1 for n in range(CLIENTS))


@pytest.mark.slow
def test_a_client_that_lost_a_rank_goes_on_with_another_number_of_ranks(place: Place) -> None:
    """When one of its ranks is killed the client ends, and says why; nothing of the round counts until it is back, as
    one process. After Ctrl-C none of its processes is left."""
    place.write(**GPT)
    server = place.server()
    clients = [place.client(0), place.client(1, *ZERO_3)]
    wait_until(lambda: "trains on" in place.said(), place.said)  # a round waits for the third client
    children = children_of(clients[1].pid)
    os.kill(children[-1], signal.SIGKILL)
    assert clients[1].wait(HANG_S) != 0
    assert "rank 1" in place.said()
    assert place.rounds() == 0
    wait_until(lambda: not any(map(runs, children)), place.said)
    interrupted = place.client(1, *TENSOR)
    wait_until(lambda: place.said().count("trains on") == 2, place.said)
    children = children_of(interrupted.pid)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(HANG_S) == 128 + signal.SIGINT
    wait_until(lambda: not any(map(runs, children)), place.said)
    assert "the same command goes on from the last contribution that counted" in place.said()
    require_simulated(place, server, clients[0], place.client(1), place.client(2))


def children_of(pid: int) -> list[int]:
    """Processes that `pid` has started, in that order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
