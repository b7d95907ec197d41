"""The wire without torch, beside torch's: an all-reduce of NumPy arrays and of tensors, in turn, in the same processes.

    python -m benchmarks.frameworks --ranks 2

Both go through the same core in C, over the same memory. Ratios are medians of those within a turn. Also: seconds to
import the wire and to meet alone, beside an import of NumPy, and where JAX is installed what a sum costs in a loop and
under `jit`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from shoal.launcher import sockets

RANK = """
import json, os, sys, time
import numpy as np
import torch
import torch.distributed as dist
import shoal.c10d
from shoal import wire

torch.set_num_threads(1)
folder, repeats = sys.argv[1], int(sys.argv[2])
group = wire.init()
store = dist.FileStore(folder + "/store", group.size)
dist.init_process_group("shoal", store=store, rank=group.rank, world_size=group.size)
rows = []
for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24):
    x = np.ones(size, np.float32)
    t = torch.from_numpy(x)  # the same memory: where it lies decides more than who asks
    calls = {"numpy": lambda: group.all_reduce(x, out=x), "torch": lambda: dist.all_reduce(t),
             "torch again": lambda: dist.all_reduce(t)}
    times = {name: [] for name in calls}
    for turn in range(repeats + 2):
        names = list(calls)[turn % 3 :] + list(calls)[: turn % 3]
        for name, call in ((name, calls[name]) for name in names):
            x[:] = 1
            inner = max(1, min(200, (1 << 18) // size))
            group.barrier()
            call()
            group.barrier()
            begin = time.perf_counter()
            for _ in range(inner):
                call()
            times[name].append((time.perf_counter() - begin) / inner)
    middle = lambda numbers: sorted(numbers)[len(numbers) // 2]
    kept = {name: t[2:] for name, t in times.items()}
    ratios = {f"{a} over {b}": middle([x / y for x, y in zip(kept[a], kept[b])])
              for a, b in (("torch", "numpy"), ("torch", "torch again"))}
    rows.append({"bytes": 4 * size, **{name: middle(t) for name, t in kept.items()}, **ratios})
if group.rank == 0:
    print(json.dumps(rows))
group.barrier()
"""
JAX = """
import json, sys, time
import jax, jax.numpy as jnp
import numpy as np
from shoal import wire
import shoal.jax

group = wire.init()
tree = {str(i): jnp.ones(1 << 16) for i in range(16)}
calls = {
    "loop": lambda t: shoal.jax.all_reduce_gradients(t, group),
    "jit": jax.jit(lambda t: shoal.jax.all_reduce_gradients(t, group)),
    "jit without exchange": jax.jit(lambda t: jax.tree.map(lambda a: a * 1.5, t)),
    "numpy": lambda t: group.all_reduce(np.concatenate([np.asarray(v) for v in t.values()])),
}
found = {}
for name, call in calls.items():
    times = []
    for _ in range(int(sys.argv[2])):
        group.barrier()
        begin = time.perf_counter()
        jax.block_until_ready(call(tree))
        times.append(time.perf_counter() - begin)
    found[name] = sorted(times)[len(times) // 2]
if group.rank == 0:
    print(json.dumps(found))
group.barrier()
"""
START = """
import time; begin = time.perf_counter(), time.process_time()
import numpy; middle = time.process_time()
from shoal import wire; wire.init()
print(time.perf_counter() - begin[0], time.process_time() - begin[1], middle - begin[1])
"""


def main() -> None:
    """Prints a line for each size, or one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = on_ranks(RANK, options.ranks, options.repeats)
    jax = on_ranks(JAX, options.ranks, options.repeats) if importlib.util.find_spec("jax") else {}
    result = {"bench": "frameworks", "rows": rows, "jax": jax, "start": started(options.repeats)}
    if options.json:
        print(json.dumps(result))
        return
    for row in rows:
        print(
            f"{row['bytes']:>10} bytes  numpy {1e6 * row['numpy']:10.1f} us  torch {1e6 * row['torch']:10.1f} us  "
            f"rate of numpy over torch's {row['torch over numpy']:.2f}  A/A {row['torch over torch again']:.2f}"
        )
    for name, seconds in jax.items():
        print(f"JAX, 16 leaves of 256 KiB: {name} {1e3 * seconds:.2f} ms")
    print("start, s:", "  ".join(f"{name} {seconds:.3f}" for name, seconds in result["start"].items()))


def on_ranks(code: str, ranks: int, repeats: int) -> Any:
    """What rank 0 printed."""
    with tempfile.TemporaryDirectory() as folder:
        with sockets.listen_on_loopback() as listener:
            port = listener.getsockname()[1]
        place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SHOAL_JOB_TOKEN": f"{folder}/token",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, folder, str(repeats)], stdout=subprocess.PIPE,
                env={**common, **{k: str(v) for k, v in place.items()}, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        said = [process.communicate()[0] for process in processes]
    return json.loads(said[0])


def started(repeats: int) -> dict[str, float]:
    """Medians: by the clock, of the processor, and of that NumPy's own import."""
    found = [
        subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(repeats)
    ]
    columns = [statistics.median(map(float, column)) for column in zip(*found, strict=True)]
    return dict(zip(("clock", "processor", "numpy"), columns, strict=True))


if __name__ == "__main__":
    main()
