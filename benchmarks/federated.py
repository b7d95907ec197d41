"""`python -m benchmarks.federated`: what the server of a federated run does in a second, and what hiding costs it.

The best of several turns is taken, and seconds are those of the processor (one thread, kernel included), for machines
are shared; the simulation has both. `aggregate` reads updates from files, as the server does, checks their digests,
screens them and makes the next model. `secret` is the server's half of SecAgg+ from the masked vectors on: summing
them, joining shares, taking masks off; the peer is plain aggregation of the same numbers, screened and averaged, and
beside it the bare sum. `simulate` counts updates of a logistic model of ten classes.

`digits` and `text` play every algorithm: which round first reaches a given accuracy or loss, and how many bytes clients
have sent by then. Each takes the best of a few learning rates at clients. What is played is kept in a folder, one file
for each simulation, and not played again.

`network` and `flower` are in `federated_rounds`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.command import run
from benchmarks.federated_rounds import beside_flower, network
from shoal.assembly.federated import federated_task
from shoal.bench.options import AsJson, names
from shoal.bench.report import Result, check, merged, print_report
from shoal.federated.config import FedAvgConfig, SecureAggregationConfig
from shoal.federated.report import RoundFigures
from shoal.federated.robust import refusal
from shoal.federated.secure.messages import Revealed
from shoal.federated.secure.server import SecureServer
from shoal.federated.secure.summing import Quantiser, play
from shoal.federated.simulation import Simulation
from shoal.federated.strategy import Update, build_strategy, weighted_sum
from shoal.federated.transport import messages
from shoal.federated.transport.store import digest_of
from shoal.runfile.load import run_file_of

AGGREGATED = 1.0
"""GB/s of updates on one core."""
SECRET = 3.0
"""The time of a secret sum over that of a plain one."""
SIMULATED = 2000.0
"""Updates of simulated clients in a second, on two cores."""
TURNS, SECRET_TURNS = 5, 3


TARGETS = {"digits": ("accuracy/eval", 0.85), "text": ("loss/eval", 3.0)}
"""What has to be reached; a loss from above."""
RATES = {"digits": (0.15, 0.5), "text": (0.25, 0.5, 1.0)}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "FedAvg": {"kind": "fedavg"},
    "FedAvgM": {"kind": "fedavgm", "momentum": 0.7},
    "FedProx": {"kind": "fedprox", "mu": 0.1},
    "FedNova": {"kind": "fednova"},
    "SCAFFOLD": {"kind": "scaffold"},
    "FedDyn": {"kind": "feddyn", "alpha": 0.1},
    "FedAdam": {"kind": "fedopt", "rule": "adam", "server_lr": 0.03},
    "FedYogi": {"kind": "fedopt", "rule": "yogi", "server_lr": 0.03},
    "FedAdagrad": {"kind": "fedopt", "rule": "adagrad", "server_lr": 0.1},
    "trimmed mean": {"kind": "trimmed_mean", "trim": 0.1},
    "median": {"kind": "median"},
    "multi-Krum": {"kind": "krum", "malicious": 1, "kept": 8},
    "geometric median": {"kind": "geometric_median"},
    "FedBuff": {"kind": "fedbuff", "buffer": 10},
}
PARTS = ("aggregate", "secret", "simulate", "network", "digits", "text", "flower")


def federated(
    parts: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}, with commas.")] = "aggregate,secret,simulate",
    megabytes: Annotated[int, typer.Option(help="Size of the model that is aggregated.", min=1)] = 100,
    uploads: Annotated[int, typer.Option(help="Clients whose updates are aggregated.", min=1)] = 8,
    secret_clients: Annotated[int, typer.Option(help="Clients of SecAgg+.", min=4)] = 100,
    numbers: Annotated[int, typer.Option(help="Numbers that each of them hides.", min=1)] = 1_000_000,
    neighbours: Annotated[int, typer.Option(help="Clients that each masks with.", min=2)] = 16,
    simulated: Annotated[int, typer.Option(help="Clients of the simulation.", min=1)] = 10_000,
    clients: Annotated[int, typer.Option(help="Clients of `digits` and `text`.", min=10)] = 20,
    rounds: Annotated[int, typer.Option(help="Rounds of `digits` and `text`, at most.", min=1)] = 30,
    only: Annotated[str, typer.Option(help="Some of the algorithms, with commas; empty: all.")] = "",
    keep: Annotated[Path, typer.Option(help="Where finished simulations of them are kept.")] = Path("federated-played"),
    as_json: AsJson = False,
) -> None:
    """Aggregation by the server, in the clear and in secret; simulated clients; all algorithms on digits and on text.

    Example: python -m benchmarks.federated --megabytes 10 --secret-clients 20 --numbers 100000 --simulated 500
    """
    some = names(only, "--only", ALGORITHMS)
    found: dict[str, Callable[[], Result]] = {
        "aggregate": lambda: aggregated(megabytes, uploads),
        "secret": lambda: secret(secret_clients, numbers, neighbours),
        "simulate": lambda: simulation(simulated),
        "network": lambda: network(megabytes, uploads),
        "digits": lambda: algorithms("digits", clients, rounds, keep, some),
        "text": lambda: algorithms("text", clients, rounds, keep, some),
        "flower": lambda: beside_flower(rounds),
    }
    result = merged([found[part]() for part in names(parts, "--parts", PARTS)])
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
            assert len({digest_of(path) for path in paths}) == 1
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
    header = messages.UpdateHeader(parts=(messages.part_of("update.0", delta),), samples=5, steps=1)
    messages.write_frame(path, header, [delta])
    return path


def _delta(path: Path) -> torch.Tensor:
    return messages.read_frame(path, messages.UpdateHeader).vectors["update.0"]


class TimedServer(SecureServer):
    """Counts the seconds that vectors and secrets take."""

    seconds = 0.0

    def take_vector(self, client: str, vector: np.ndarray, now_s: float) -> None:
        began_s = time.process_time()
        super().take_vector(client, vector, now_s)
        self.seconds += time.process_time() - began_s

    def take_secrets(self, client: str, revealed: Revealed, now_s: float) -> None:
        began_s = time.process_time()
        super().take_secrets(client, revealed, now_s)
        self.seconds += time.process_time() - began_s


def secret(clients: int, numel: int, neighbours: int) -> Result:
    """The server's work in SecAgg+, one client lost before its vector came, beside a sum in the clear."""
    torch.set_num_threads(1)
    everybody = [f"client-{i:04d}" for i in range(clients)]
    quantiser = Quantiser(20, 1.0, clients)
    vector = quantiser.encode(np.full(numel, 0.1), 1)
    found: list[float] = []
    for _ in range(SECRET_TURNS):
        server = TimedServer(
            SecureAggregationConfig(neighbours=neighbours),
            tuple(everybody),
            session=b"benchmark",
            numel=numel + 1,
            dtype=quantiser.dtype,
            least=2,
            phase_s=10.0,
            now_s=0.0,
        )
        play(server, dict.fromkeys(everybody, vector), lost={everybody[0]: "vectors"})
        assert server.phase == "summed", server.reason
        assert int(server.total[-1]) == clients - 1
        found.append(server.seconds)
    floats = [torch.full((numel,), 0.1) for _ in range(clients - 1)]
    plain = _times(lambda: weighted_sum(floats, torch.full((len(floats),), 1 / len(floats))))
    screened = _times(lambda: _plain_round(floats))
    row = {
        "what": "secret",
        "clients": clients,
        "numbers": numel,
        "neighbours": neighbours,
        "time_s": min(found),
        "plain_s": min(screened),
        "ratio": min(found) / min(screened),
        "bare_sum_s": min(plain),
        "ratio_bare": min(found) / min(plain),
    }
    return {"rows": [row], "checks": [check("SecAgg+ over plain aggregation", row["ratio"], SECRET, at_most=True)]}


def _plain_round(floats: list[torch.Tensor]) -> None:
    """What the server does with updates in the clear: it looks at each, and averages."""
    config = FedAvgConfig(clients=len(floats))
    updates = [Update(str(i), 0, 1, delta) for i, delta in enumerate(floats)]
    assert all(refusal(update, config, numel=floats[0].numel()) is None for update in updates)
    build_strategy(config, floats[0].numel()).mean(updates)


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
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        rows = one.run()
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    updates = sum(row.counted for row in rows)
    row = {
        "what": "simulate",
        "clients": clients,
        "updates": updates,
        "wall_s": seconds,
        "per_s": updates / seconds,
        "cpu_s": cpu_s,
        "per_cpu_s": updates / cpu_s,
    }
    return {"rows": [row], "checks": [check("simulated updates in a second", updates / seconds, SIMULATED)]}


class Arrived(Exception):
    """What had to be reached is reached."""


def algorithms(data: str, clients: int, rounds: int, keep: Path, some: list[str]) -> Result:
    """Algorithms on `data`: Dirichlet parts of 0.1 of the digits, or runs of files of the standard library."""
    torch.set_num_threads(1)
    keep.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in some:
        tried = [_played(data, name, ALGORITHMS[name], lr, clients, rounds, keep) for lr in RATES[data]]
        rows.append(min(tried, key=_order))
    best = {row["algorithm"]: row["rounds"] or rounds + 1 for row in rows}
    if not {"FedAvg", "SCAFFOLD", "FedProx"} <= set(best):
        return {"rows": rows, "checks": []}
    drift = min(best["SCAFFOLD"], best["FedProx"])
    bound = check(f"{data}: rounds of SCAFFOLD or FedProx", drift, best["FedAvg"], at_most=True)
    return {"rows": rows, "checks": [bound]}


def _order(row: dict[str, Any]) -> tuple[float, float]:
    """Fewest rounds first; of those that do not arrive, the best at the end."""
    return row["rounds"] or float("inf"), row["last"] if TARGETS[row["what"]][0] == "loss/eval" else -row["last"]


def _played(
    data: str, name: str, keys: dict[str, Any], lr: float, clients: int, rounds: int, keep: Path
) -> dict[str, Any]:
    path = keep / f"{data}-{clients}-{rounds}-{name.replace(' ', '-')}-{lr:g}.json"
    if path.exists():
        return json.loads(path.read_text())
    tables = _tables(data, keys, lr, clients, rounds)
    figure, target = TARGETS[data]
    row: dict[str, Any] = {"what": data, "algorithm": name, "clients": clients, "lr": lr, "rounds": None, "up_mb": None}
    sent = 0

    def on_round(made: RoundFigures) -> None:
        nonlocal sent
        sent += made.up_bytes
        row["last"] = made.values[figure]
        if row["last"] <= target if figure == "loss/eval" else row["last"] >= target:
            row.update(rounds=made.round, up_mb=round(sent / 1e6, 3))
            raise Arrived

    with suppress(Arrived):
        Simulation(federated_task(run_file_of(tables, file="benchmark"))).run(on_round)
    path.write_text(json.dumps(row))
    print(row, file=sys.stderr, flush=True)
    return row


def _tables(data: str, keys: dict[str, Any], lr: float, clients: int, rounds: int) -> dict[str, Any]:
    federated = {"clients": clients, "local_epochs": 5} if data == "digits" else {"clients": clients, "local_steps": 10}
    shared: dict[str, Any] = {
        "run": {"name": "bench", "steps": rounds, "seed": 1},
        "optimizer": {"kind": "sgd", "lr": lr},
        "schedule": {"kind": "constant"},
        "federated": {**federated, **keys},
        "devices": {"together": 32, "step_spread": 0.5},
    }
    if data == "digits":
        return shared | {
            "model": {"kind": "mlp", "inputs": 64, "hidden": [32], "outputs": 10},
            "data": {"kind": "digits"},
            "batch": {"global_samples": 16},
            "partition": {"kind": "dirichlet", "concentration": 0.1},
        }
    return shared | {
        "model": {"kind": "gpt", "width": 32, "layers": 1, "heads": 2},
        "data": {"kind": "stdlib", "held_out_fraction": 0.002},
        "batch": {"global_samples": 8, "sequence": 64},
        "partition": {"kind": "contiguous"},
    }


def _times(function: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(TURNS):
        began_s = time.process_time()
        function()
        found.append(time.process_time() - began_s)
    return found


if __name__ == "__main__":
    run(federated)
