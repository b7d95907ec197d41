"""`python -m benchmarks.federated`: what the server of a federated run does in a second, and what hiding costs it.

The best of several turns is taken, for the machine is shared. `aggregate` reads updates from files, as the server
does, screens them and makes the next model. `secret` is the server's half of SecAgg+ from the masked vectors
on: summing them, joining shares, taking masks off; the peer is the sum of the same vectors in the clear. `simulate`
counts updates of a logistic model of ten classes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.command import run
from shoal.assembly.federated import federated_task
from shoal.bench.options import AsJson
from shoal.bench.report import Result, check, merged, print_report
from shoal.federated.config import FedAvgConfig, SecureAggregationConfig
from shoal.federated.screening import refusal
from shoal.federated.secure.in_process import play
from shoal.federated.secure.masks import Quantiser
from shoal.federated.secure.messages import Revealed
from shoal.federated.secure.server import SecureServer
from shoal.federated.simulation import Simulation
from shoal.federated.strategy import Update, build_strategy, weighted_sum
from shoal.federated.transport import frame
from shoal.runfile.load import run_file_of

AGGREGATED = 1.0
"""GB/s of updates on one core."""
SECRET = 3.0
"""The time of a secret sum over that of a plain one."""
SIMULATED = 2000.0
"""Updates of simulated clients in a second, on two cores."""
TURNS, SECRET_TURNS = 5, 3


def federated(
    megabytes: Annotated[int, typer.Option(help="Size of the model that is aggregated.", min=1)] = 100,
    uploads: Annotated[int, typer.Option(help="Clients whose updates are aggregated.", min=1)] = 8,
    secret_clients: Annotated[int, typer.Option(help="Clients of SecAgg+.", min=4)] = 100,
    numbers: Annotated[int, typer.Option(help="Numbers that each of them hides.", min=1)] = 1_000_000,
    neighbours: Annotated[int, typer.Option(help="Clients that each masks with.", min=2)] = 16,
    simulated: Annotated[int, typer.Option(help="Clients of the simulation.", min=1)] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Aggregation by the server, in the clear and in secret, and simulated clients.

    Example: python -m benchmarks.federated --megabytes 10 --secret-clients 20 --numbers 100000 --simulated 500
    """
    result = merged(
        [
            aggregated(megabytes, uploads),
            secret(secret_clients, numbers, neighbours),
            simulation(simulated),
        ]
    )
    print_report("federated", result, as_json=as_json)


def aggregated(megabytes: int, clients: int) -> Result:
    """Updates in files, to the next model, on one thread."""
    torch.set_num_threads(1)
    numel = megabytes * 250_000
    config = FedAvgConfig(clients=clients)
    strategy, model = build_strategy(config, numel), torch.zeros(numel)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        paths = [_written(Path(folder, str(i)), numel) for i in range(clients)]

        def aggregate() -> None:
            updates = [Update(str(i), 0, 5, _delta(path)) for i, path in enumerate(paths)]
            assert all(refusal(update, config, numel=numel) is None for update in updates)
            strategy.aggregate(model, updates, version=0)

        seconds = _times(aggregate)
        plain = _times(lambda: weighted_sum([_delta(path) for path in paths], torch.ones(clients)))
    moved = 4 * numel * clients / 1e9
    row = {
        "what": "aggregate",
        "clients": clients,
        "bytes_each": 4 * numel,
        "time_s": min(seconds),
        "median_s": statistics.median(seconds),
        "sum_alone_s": min(plain),
        "gb_per_s": moved / min(seconds),
    }
    return {"rows": [row], "checks": [check("aggregation, GB/s of one core", moved / min(seconds), AGGREGATED)]}


def _written(path: Path, numel: int) -> Path:
    delta = torch.full((numel,), 1e-3)
    header = frame.UpdateHeader(parts=(frame.part_of("update.0", delta),), samples=5, steps=1)
    frame.write(path, header, [delta])
    return path


def _delta(path: Path) -> torch.Tensor:
    return frame.read(path, frame.UpdateHeader).vectors["update.0"]


class TimedServer(SecureServer):
    """Counts the seconds that vectors and secrets take."""

    seconds = 0.0

    def take_vector(self, client: str, vector: np.ndarray, now_s: float) -> None:
        began_s = time.perf_counter()
        super().take_vector(client, vector, now_s)
        self.seconds += time.perf_counter() - began_s

    def take_secrets(self, client: str, revealed: Revealed, now_s: float) -> None:
        began_s = time.perf_counter()
        super().take_secrets(client, revealed, now_s)
        self.seconds += time.perf_counter() - began_s


def secret(clients: int, numel: int, neighbours: int) -> Result:
    """The server's work in SecAgg+, one client lost before its vector came, beside a sum in the clear."""
    torch.set_num_threads(1)
    names = [f"client-{i:04d}" for i in range(clients)]
    quantiser = Quantiser(20, 1.0, clients)
    vector = quantiser.encode(np.full(numel, 0.1), 1)
    found: list[float] = []
    for _ in range(SECRET_TURNS):
        server = TimedServer(
            SecureAggregationConfig(neighbours=neighbours),
            tuple(names),
            session=b"benchmark",
            numel=numel + 1,
            dtype=quantiser.dtype,
            least=2,
            phase_s=10.0,
            now_s=0.0,
        )
        play(server, dict.fromkeys(names, vector), lost={names[0]: "vectors"})
        assert server.phase == "summed", server.reason
        assert int(server.total[-1]) == clients - 1
        found.append(server.seconds)
    floats = [torch.full((numel,), 0.1) for _ in range(clients - 1)]
    plain = _times(lambda: weighted_sum(floats, torch.full((len(floats),), 1 / len(floats))))
    row = {
        "what": "secret",
        "clients": clients,
        "numbers": numel,
        "neighbours": neighbours,
        "time_s": min(found),
        "plain_s": min(plain),
        "ratio": min(found) / min(plain),
    }
    return {"rows": [row], "checks": [check("SecAgg+ over a plain sum", row["ratio"], SECRET, at_most=True)]}


def simulation(clients: int) -> Result:
    """Rounds in which every client takes part, once each, with five local steps of 16 samples."""
    torch.set_num_threads(1)  # operations are small: a second thread would only wait
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "bench", "steps": 2},
        "model": {"kind": "mlp", "inputs": 64, "hidden": [], "outputs": 10},
        "batch": {"global_samples": 16},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "federated": {"kind": "fedavg", "clients": clients, "local_steps": 5, "evaluate_every": 2},
        "devices": {"together": 256},
    }
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        # What torch imports when it first vectorises is no part of a client's update.
        draw, samples = np.random.default_rng(0), 20 * clients
        np.save(f"{folder}/inputs.npy", draw.normal(size=(samples, 64)).astype(np.float32))
        np.save(f"{folder}/targets.npy", draw.integers(0, 10, samples))
        tables["data"] = {"kind": "arrays", "inputs": f"{folder}/inputs.npy", "targets": f"{folder}/targets.npy"}
        few = {**tables, "federated": {**tables["federated"], "clients": 2}}
        Simulation(federated_task(run_file_of(few, file="benchmark"))).run()
        one = Simulation(federated_task(run_file_of(tables, file="benchmark")))
        began_s = time.perf_counter()
        rows = one.run()
        seconds = time.perf_counter() - began_s
    updates = sum(row.counted for row in rows)
    row = {"what": "simulate", "clients": clients, "updates": updates, "time_s": seconds, "per_s": updates / seconds}
    return {"rows": [row], "checks": [check("simulated updates in a second", updates / seconds, SIMULATED)]}


def _times(function: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(TURNS):
        began_s = time.perf_counter()
        function()
        found.append(time.perf_counter() - began_s)
    return found


if __name__ == "__main__":
    run(federated)
