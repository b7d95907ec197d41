"""A link that drops from 1 Gbit/s to 50 Mbit/s and comes back: sums that adapt, beside every fixed way.

    python -m benchmarks.adaptive            # needs root and iproute2: two hosts as network namespaces

Two ranks without torch sum a vector of 4 MB again and again over TCP; the link is changed after each third of the sums.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shoal.launcher.lab.lab_file import lab_from
from shoal.launcher.lab.network import INTERFACE, Network, network, tc

RATES = (1000, 50, 1000)
BURST_BYTES = 32 << 10
"""What a link lets through at once: little beside the shortest message, so that a message sees the link's rate."""
NUMBERS = 1_000_000
FIXED = ("plain", "int8", "top-k")
RANK = """
import json, os, sys, time
import numpy as np
from shoal import wire

name, steps, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ways = {"plain": None, "int8": wire.Int8(), "top-k": wire.ErrorFeedback(wire.TopK(0.01))}
group = wire.init()
reducer = wire.Adaptive(group, ways if name == "adaptive" else {name: ways[name]})
x = np.random.default_rng(group.rank).standard_normal(int(sys.argv[4])).astype(np.float32)
phases = []
for phase in range(3):
    group.barrier()
    if group.rank == 0:
        open(f"{folder}/want-{phase}", "w").close()
        while not os.path.exists(f"{folder}/set-{phase}"):
            time.sleep(0.01)
    group.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        reducer.all_reduce(x, op="avg")
    phases.append(time.perf_counter() - begin)
if group.rank == 0:
    used = {way: sum(each == way for each, _, _ in reducer.log) for way in ways}
    print(json.dumps({"phases_s": phases, "used": used}))
"""


def main() -> None:
    """Prints a line for each way, or one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lab = lab_from({"lab": {"hosts": 2, "rate_mbit": RATES[0]}}, file="lab")
    with network(lab) as net:
        rows = {name: measured(net, name, options.steps) for name in (*FIXED, "adaptive")}
    best = [min(rows[name]["phases_s"][phase] for name in FIXED) for phase in range(3)]
    lost = [rows["adaptive"]["phases_s"][phase] / best[phase] for phase in range(3)]
    whole = {name: sum(row["phases_s"]) for name, row in rows.items()}
    result = {"bench": "adaptive", "rows": rows, "seconds": whole, "over_best_of_phase": lost}
    if options.json:
        print(json.dumps(result))
        return
    for name, row in rows.items():
        phases = "  ".join(f"{seconds:7.2f}" for seconds in row["phases_s"])
        print(f"{name:9} {phases}  whole {whole[name]:7.2f} s  {row['used']}")
    print("adaptive over the best of each phase:", "  ".join(f"{ratio:.3f}" for ratio in lost))
    print("the best fixed way over adaptive:", f"{min(whole[name] for name in FIXED) / whole['adaptive']:.3f}")


def measured(net: Network, name: str, steps: int) -> dict[str, Any]:
    """Seconds of each phase, and how often each way was used."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [*net.enter(rank), sys.executable, "-c", RANK, name, str(steps), folder, str(NUMBERS)],
                env={**os.environ, **_place(rank), **net.environ(rank), "SHOAL_JOB_TOKEN": f"{folder}/token"},
                stdout=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        for phase, rate in enumerate(RATES):
            _until(Path(folder) / f"want-{phase}", ranks)
            for namespace in net.namespaces:
                tc(
                    [f"qdisc change dev {INTERFACE} root tbf rate {rate}mbit burst {BURST_BYTES} latency 100ms"],
                    namespace=namespace,
                )
            (Path(folder) / f"set-{phase}").touch()
        said, _ = ranks[0].communicate()
        ranks[1].communicate()
    return json.loads(said)


def _place(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}


def _until(path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    while not path.exists():
        if any(rank.poll() for rank in ranks):
            raise RuntimeError("a rank failed: see its output above")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
