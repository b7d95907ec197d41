"""One command on a Ray cluster: waits for room, runs on the host that has it, gets SIGTERM too, keeps its exit code.

    RAY_ADDRESS=10.0.0.1:6379 python -m shoal.submit.ray_trial [--cpus 1] [--gpus 0] COMMAND ...

A sweep starts its trials by it (`shoal sweep --via ray`): each takes its place in the cluster's own queue. The hosts
share the folder in which it is called.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from shoal.errors import CollectiveError, ShoalError, Stopped
from shoal.submit.ray_driver import RayHost, connect, import_ray

SAVE_S = 120.0
_LOOK_S = 0.1


def run_trial(command: Sequence[str], *, cpus: float, gpus: float, address: str) -> int:
    """Its exit code, 75 after SIGTERM. Raises `EnvironmentFault` where there is no cluster."""
    ray = import_ray()
    connect(ray, address)
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):  # after `ray.init`, which sets a handler of its own
        signal.signal(number, note)
    host = ray.remote(RayHost).options(num_cpus=cpus, num_gpus=gpus, max_concurrency=2).remote()
    try:
        ended = host.run.remote(command, dict(_passed_on()), str(Path.cwd()))
        while True:
            ready, _ = ray.wait([ended], timeout=_LOOK_S)
            if ready:
                return ray.get(ended)
            if asked:
                ray.wait([host.stop.remote(SAVE_S)], timeout=SAVE_S)
                ready, _ = ray.wait([ended], timeout=_LOOK_S)
                return ray.get(ended) if ready else Stopped.exit_code
    except ray.exceptions.RayActorError as error:
        print(f"shoal: the host of this trial was lost ({str(error).splitlines()[0]})", file=sys.stderr)
        return CollectiveError.exit_code
    finally:
        ray.kill(host)


def _passed_on() -> list[tuple[str, str]]:
    """Variables that the command needs on another host: Python's, and Shoal's own."""
    return [(name, value) for name, value in os.environ.items() if name.startswith(("PYTHON", "SHOAL_", "OMP_"))]


def main(arguments: Sequence[str]) -> int:
    """The command's exit code, or that of what stood in its way."""
    parser = argparse.ArgumentParser(prog="python -m shoal.submit.ray_trial")
    parser.add_argument("--cpus", type=float, default=1.0)
    parser.add_argument("--gpus", type=float, default=0.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    found = parser.parse_args(arguments)
    try:
        return run_trial(found.command, cpus=found.cpus, gpus=found.gpus, address=os.environ.get("RAY_ADDRESS", "auto"))
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
