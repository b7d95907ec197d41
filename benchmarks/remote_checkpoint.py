"""What copies in a remote store cost training: the stall of a save with them, beside that of a save on the disk alone.

    python -m benchmarks.remote_checkpoint --mebibytes 64 --saves 12

A thread multiplies matrices as training would, saves the same tensors in turns into two directories (in one of them,
checkpoints are copied to an S3 server in another process that fails a tenth of the requests and answers 20 ms late),
and measures how long each `save` held it up, and how long a step took while the save was under way. Prints one JSON
object. The bound: the median stall with copies is at most 1.5 times that without.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.remote import RemoteCheckpoints, RemoteCopies
from shoal.checkpoint.save import Saver

FAILING, SLOW_S, BOUND = 0.1, 0.02, 1.5


def serve(pipe: Connection) -> None:
    """An S3 server with trouble, until the pipe is closed."""
    from tests.checkpoint.s3_server import s3_server

    with s3_server() as server:
        server.trouble.become(failing=FAILING, slow_s=SLOW_S)
        pipe.send(server.options)
        pipe.poll(None)
        pipe.send(server.trouble.failed)


def step(a: torch.Tensor, b: torch.Tensor) -> float:
    """Seconds of one step."""
    begin_s = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - begin_s


def measure(mebibytes: int, saves: int, steps: int) -> dict[str, Any]:
    """Stalls and step times of both ways, in turns."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,))
    server.start()
    options = here.recv()
    tensors = {f"model/{n}": torch.randn(mebibytes << 14) for n in range(16)}
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    found: dict[str, dict[str, list[float]]] = {way: {"stall_s": [], "step_s": []} for way in ("disk", "remote")}
    warnings: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        savers = {
            way: Saver(
                Path(folder, way),
                rank=0,
                world_size=1,
                exchange=LocalExchange(),
                config=CheckpointConfig(),
                timeout_s=60.0,
            )
            for way in found
        }
        store = RemoteCheckpoints("s3://copies/bench", options=options)
        with RemoteCopies(store, Path(folder, "remote"), keep=3, warn=warnings.append) as copies:
            savers["remote"].on_commit = copies.committed
            for number in range(1, saves + 1):
                for way, saver in savers.items():
                    for tensor in tensors.values():
                        tensor.add_(1.0)
                    found[way]["stall_s"].append(saver.save(number, tensors, {}, layout={}))
                    found[way]["step_s"].extend(step(a, b) for _ in range(steps))
                    (report,) = saver.wait()
                    assert report.committed, report.error
        arrived = store.steps()
    here.send(None)
    failed = here.recv()
    server.join()
    return {"ways": found, "warnings": warnings, "newest": max(arrived), "failed_requests": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--saves", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(given.mebibytes, given.saves, given.steps)
    rows = []
    for way, values in result.pop("ways").items():
        stalls = values["stall_s"][1:]  # the first allocates the staging memory
        rows.append(
            {
                "way": way,
                "stall_median_s": statistics.median(stalls),
                "stall_least_s": min(stalls),
                "stall_most_s": max(stalls),
                "step_median_s": statistics.median(values["step_s"]),
            }
        )
    ratio = rows[1]["stall_median_s"] / rows[0]["stall_median_s"]
    checks = [
        {"name": "stall, remote / disk", "value": ratio, "bound": BOUND, "holds": ratio <= BOUND},
        {"name": "checkpoints lost", "value": len(result["warnings"]), "bound": 0, "holds": not result["warnings"]},
    ]
    machine = {"platform": platform.platform(), "torch": str(torch.__version__)}
    print(json.dumps({"bench": "remote_checkpoint", "machine": machine, "rows": rows, "checks": checks, **result}))


if __name__ == "__main__":
    main()
