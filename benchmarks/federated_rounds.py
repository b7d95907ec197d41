"""Rounds of the benchmark `federated` between real ends.

`network` is a real server and real clients, a process each, over TLS on loopback; clients change the model a little and
send it back. The server's seconds are those of its processor from its start to its end, less those of a run of one
round.

`flower` plays rounds of eight clients that do nothing by one client app and one strategy of Flower: under its own
simulation (Ray) and under Shoal's, in one process. It needs `flwr` and `ray`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.bench.report import Result, check

NETWORK_ROUNDS = 4
ENDS = """
import json, resource, sys
import torch
import shoal

torch.set_num_threads(1)
tables, folder, port, name = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]

def train(model, samples, *, round, lr):
    with torch.no_grad():
        model.bias += 1e-3
    return {"steps": 1}

if name == "server":
    role = shoal.FederatedServer(folder + "/certificates", port=port)
else:
    role = shoal.FederatedClient(f"127.0.0.1:{port}", folder + "/certificates", name, part=int(name[1:]))
width = tables.pop("width")
data = torch.utils.data.TensorDataset(torch.zeros(8, width), torch.zeros(8, dtype=torch.int64))
report = shoal.federate(tables, model=lambda: torch.nn.Linear(width, width), data=data, train=train, role=role)
if name == "server":
    used = resource.getrusage(resource.RUSAGE_SELF)
    said = {"cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": 1024 * used.ru_maxrss, "report": report}
    print(json.dumps(said))
"""
"""What each process of `network` runs."""


def network(megabytes: int, clients: int) -> Result:
    """Rounds over TLS: what the server needs for a byte that comes and one that goes."""
    short, long = (_served(megabytes, clients, rounds) for rounds in (1, NETWORK_ROUNDS))
    more = NETWORK_ROUNDS - 1
    times = [row["time_s"] for row in long["report"]["rounds"]]
    totals = [one["report"]["totals"] for one in (short, long)]
    received, sent = ((totals[1][name] - totals[0][name]) / more for name in ("up_bytes", "down_bytes"))
    cpu_s = (long["cpu_s"] - short["cpu_s"]) / more
    row = {
        "what": "network",
        "clients": clients,
        "received_bytes": received,
        "sent_bytes": sent,
        "round_s": statistics.median(np.diff(times)),
        "server_cpu_s": cpu_s,
        "gb_per_s": (received + sent) / 1e9 / cpu_s,
        "peak_bytes": long["peak_bytes"],
    }
    return {"rows": [row], "checks": []}


def _served(megabytes: int, clients: int, rounds: int) -> dict[str, Any]:
    """What the server of a run of processes says at its end."""
    from shoal.federated.transport.enrol import enrol

    names = ["server", *(f"c{number}" for number in range(clients))]
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder, socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        held.close()
        enrol(Path(folder, "certificates"), names=names[1:], hosts=["127.0.0.1"], days=1)
        tables = {
            "width": int((megabytes * 250_000) ** 0.5),
            "run": {"name": "bench", "steps": rounds, "directory": folder + "/run"},
            "optimizer": {"kind": "sgd", "lr": 0.1},
            "batch": {"global_samples": 1},
            "federated": {"kind": "fedavg", "clients": clients},
        }
        ends = [
            subprocess.Popen(
                [sys.executable, "-c", ENDS, json.dumps(tables), folder, str(port), name],
                stdout=subprocess.PIPE if name == "server" else sys.stderr,
                text=True,
            )
            for name in names
        ]
        try:
            said, _ = ends[0].communicate()
            if any(end.wait() for end in ends):
                raise SystemExit("a server or a client of the benchmark failed; see above")
        finally:
            for end in ends:
                end.kill()
        return json.loads(said.splitlines()[-1])


def beside_flower(rounds: int) -> Result:
    """The median time from one evaluation at the server to the next, of a model of 7,850 numbers."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    import shoal

    app, server, stamps = ClientApp(), ServerApp(), dict[str, list[float]](flower=[], shoal=[])
    clients, model = 8, lambda: torch.nn.Linear(784, 10)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    def stamp(who: str) -> None:
        stamps[who].append(time.perf_counter())

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        arrays = ArrayRecord(model().state_dict())
        strategy.start(grid, arrays, num_rounds=rounds, evaluate_fn=lambda *_: stamp("flower"))

    data = torch.utils.data.TensorDataset(torch.zeros(clients, 784), torch.zeros(clients, dtype=torch.int64))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        tables = {
            "run": {"name": "bench", "steps": rounds, "directory": folder},
            "optimizer": {"kind": "sgd", "lr": 0.1},
            "batch": {"global_samples": 1},
            "federated": {"kind": "fedavg", "clients": clients},
        }
        strategy = FedAvg(fraction_evaluate=0.0)
        shoal.federate(tables, model=model, data=data, train=app, strategy=strategy, evaluate=lambda _: stamp("shoal"))
    run_simulation(server, app, clients, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    took = {who: float(np.median(np.diff(times[2:]))) for who, times in stamps.items()}
    row = {"what": "flower", "clients": clients, "rounds": rounds, **{f"{who}_ms": 1e3 * s for who, s in took.items()}}
    ratio = took["flower"] / took["shoal"]
    return {"rows": [row | {"ratio": ratio}], "checks": [check("time of a round, Flower's over Shoal's", ratio, 3.0)]}
