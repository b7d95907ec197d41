"""A link that drops from 1 Gbit/s to 50 Mbit/s and comes back: sums that adapt, beside every fixed way.

    python -m benchmarks.adaptive            # needs root and iproute2: two hosts as network namespaces

Two ranks without torch sum a vector of 4 MB again and again over TCP; the link is changed after each third of the sums.

    python -m benchmarks.adaptive --alarms 1000 --busy 12

What a run says of its links (`LinkWatch`): two ranks sum 1 MB over Gloo after 10 ms of work, in so many steps at 1
Gbit/s, a hundred at most at 50 Mbit/s, and so many again, while other processes compute in bursts on the same cores. A
line without a change of the rate is a false alarm. `--loopback`: over the host's own loopback, which does not change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from shoal.launcher import sockets
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

folder, name, steps, numbers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ways = {"plain": None, "int8": wire.Int8(), "top-k": wire.ErrorFeedback(wire.TopK(0.01))}
group = wire.init()
reducer = wire.Adaptive(group, ways if name == "adaptive" else {name: ways[name]})
x = np.random.default_rng(group.rank).standard_normal(numbers).astype(np.float32)
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


WATCHED = """
import json, os, sys, time
import torch
from torch._C._distributed_c10d import PrefixStore
from shoal.bench.groups import CPU, join_store
from shoal.comm.config import WireConfig
from shoal.comm.link_watch import LinkWatch
from shoal.comm.mesh import build_mesh
from shoal.launcher.environment import place_from
from shoal.topology.layout import Layout

folder, *steps = sys.argv[1], *map(int, sys.argv[2:])
place = place_from(os.environ)
wire = WireConfig(algorithm="auto", transport="gloo")
mesh = build_mesh(Layout(replicate=place.world_size), place.rank, store=join_store(place), device=CPU, wire=wire)
watch, numbers, found = LinkWatch(mesh.world, mesh.ledger, mesh.opened, None), torch.zeros(1 << 18), []
for phase, count in enumerate(steps):
    mesh.world.barrier().wait()
    if place.rank == 0:
        open(f"{folder}/want-{phase}", "w").close()
        while not os.path.exists(f"{folder}/set-{phase}"):
            time.sleep(0.01)
    mesh.world.barrier().wait()
    begin, said = time.perf_counter(), []
    for step in range(1, count + 1):
        watch.begin()
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            sum(range(1000))
        mesh.world.all_reduce(numbers).wait()
        watch.end()
        said += [[step, line] for line in watch.take_lines()]
    seconds = time.perf_counter() - begin
    found.append({"steps": count, "step_s": seconds / count, "load": os.getloadavg()[0], "said": said})
if place.rank == 0:
    print(json.dumps(found))
"""
BURSTS = """
import os, random, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.perf_counter() + random.uniform(0, 1)
    while time.perf_counter() < end:
        sum(range(10_000))
    time.sleep(random.uniform(0, 1))
"""


def main() -> None:
    """Prints a line for each way, or one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ways", default=",".join(FIXED), help="Fixed ways, with commas.")
    parser.add_argument("--rounds", type=int, default=1, help="Of all ways in turn; medians of their phases.")
    parser.add_argument("--alarms", type=int, default=0, help="Steps that are watched, in place of ways.")
    parser.add_argument("--busy", type=int, default=0, help="Processes that compute meanwhile, with --alarms.")
    parser.add_argument("--loopback", action="store_true", help="With --alarms: no lab.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.alarms:
        print_alarms(options.alarms, options.busy, loopback=options.loopback, as_json=options.json)
        return
    lab = lab_from({"lab": {"hosts": 2, "rate_mbit": RATES[0]}}, file="lab")
    ways = [*options.ways.split(","), "adaptive"]
    with network(lab) as net:
        runs = [{name: measured(net, name, options.steps) for name in ways} for _ in range(options.rounds)]
    rows = {name: _median([turn[name] for turn in runs]) for name in ways}
    best = [min(rows[name]["phases_s"][phase] for name in ways[:-1]) for phase in range(3)]
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
    print("the best fixed way over adaptive:", f"{min(whole[name] for name in ways[:-1]) / whole['adaptive']:.3f}")


def print_alarms(steps: int, busy: int, *, loopback: bool, as_json: bool) -> None:
    """Prints what was said in each phase, and whether it should have been."""
    phases = [steps] if loopback else [steps, min(steps, 100), steps]
    bursts = [subprocess.Popen([sys.executable, "-c", BURSTS]) for _ in range(busy)]
    try:
        lab = lab_from({"lab": {"hosts": 2, "rate_mbit": RATES[0]}}, file="lab")
        with nullcontext() if loopback else network(lab) as net:
            rows = run(net, WATCHED, *phases, phases=len(phases))
    finally:
        for process in bursts:
            process.kill()
    false = sum(len(row["said"]) for row in rows) - sum(bool(row["said"]) for row in rows[1:])
    found = [row["said"][0][0] if row["said"] else None for row in rows[1:]]
    result = {"bench": "adaptive", "rows": rows, "false_alarms": false, "seen_after_steps": found}
    if as_json:
        print(json.dumps(result))
        return
    for row in rows:
        print(f"{row['steps']} steps of {1e3 * row['step_s']:.1f} ms at a load of {row['load']:.1f}: {row['said']}")
    print(f"false alarms: {false}; changes seen after steps: {found}")


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last run, with the medians of all runs' phases."""
    phases = zip(*(each["phases_s"] for each in runs), strict=True)
    return {**runs[-1], "phases_s": [statistics.median(seconds) for seconds in phases]}


def measured(net: Network, name: str, steps: int) -> dict[str, Any]:
    """Seconds of each phase, and how often each way was used."""
    return run(net, RANK, name, steps, NUMBERS, phases=len(RATES))


def run(net: Network | None, code: str, *given: object, phases: int) -> Any:
    """What rank 0 of two prints, as JSON. `code` is given a folder, then `given`; each phase has its rate on `net`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, folder, *map(str, given)]
        ranks = [
            subprocess.Popen(
                command if net is None else [*net.enter(rank), *command],
                env={**os.environ, **_place(rank, net), "SHOAL_JOB_TOKEN": f"{folder}/token"},
                stdout=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        for phase in range(phases):
            _until(Path(folder) / f"want-{phase}", ranks)
            shape = f"tbf rate {RATES[phase]}mbit burst {BURST_BYTES} latency 100ms"
            for namespace in [] if net is None else net.namespaces:
                tc([f"qdisc change dev {INTERFACE} root {shape}"], namespace=namespace)
            (Path(folder) / f"set-{phase}").touch()
        said, _ = ranks[0].communicate()
        ranks[1].communicate()
    return json.loads(said.splitlines()[-1])


def _place(rank: int, net: Network | None) -> dict[str, str]:
    if net is None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", **meeting}
    else:
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **net.environ(rank)}
    return {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", **local}


@cache
def _free_port() -> int:
    with sockets.listen_on_loopback() as listener:
        return listener.getsockname()[1]


def _until(path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    while not path.exists():
        if any(rank.poll() for rank in ranks):
            raise RuntimeError("a rank failed: see its output above")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
