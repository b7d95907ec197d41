"""The live page of 2,000 ranks: the time to its first figures, to answer a request, to take in a new step, its memory.

Beside it, in a process of its own, the report's reader, which reads the same files once and does not follow them.

    python -m benchmarks.watch --json
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

from benchmarks.many_ranks import write_many

PAGE_BOUND_S, MEMORY_BOUND_BYTES = 1.0, 200e6
_READ_ALL = """
import resource, sys, time
from pathlib import Path
from shoal.observe.record import read_record
begin_s = time.perf_counter()
read_record(Path(sys.argv[1]))
print(time.perf_counter() - begin_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def measure(directory: Path, *, ranks: int, steps: int) -> dict[str, Any]:
    """Seconds and bytes of `shoal watch` on a run of that size, and of reading all of it."""
    written_bytes = write_many(directory, ranks=ranks, steps=steps)
    command = [sys.executable, "-m", "shoal", "watch", str(directory)]
    begin_s = time.perf_counter()
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        address = urllib.parse.urlsplit(watching.stdout.readline().strip())
        while _snapshot(address)["runs"] in ([],) or _snapshot(address)["runs"][0]["unread_bytes"]:
            time.sleep(0.05)
        ready_s = time.perf_counter() - begin_s
        answers: list[float] = []
        size_bytes = 0
        for _ in range(9):
            begin_s = time.perf_counter()
            size_bytes = len(_get(address, "/")) + len(_get(address, "/page.js")) + len(_get(address, "/snapshot"))
            answers.append(time.perf_counter() - begin_s)
        status = Path(f"/proc/{watching.pid}/status").read_text()
        peak_bytes = 1024 * int(status.split("VmHWM:")[1].split()[0])
    finally:
        watching.terminate()
        watching.wait()
    done = subprocess.run([sys.executable, "-c", _READ_ALL, str(directory)], capture_output=True, text=True, check=True)
    all_s, all_bytes = map(float, done.stdout.split())
    return {
        "ranks": ranks, "steps": steps, "events_bytes": written_bytes, "ready_s": ready_s, "answer_s": max(answers),
        "answer_bytes": size_bytes, "peak_bytes": peak_bytes, "read_all_s": all_s, "read_all_peak_bytes": all_bytes,
    }  # fmt: skip


def _snapshot(address: urllib.parse.SplitResult) -> dict[str, Any]:
    return json.loads(_get(address, "/snapshot"))


def _get(address: urllib.parse.SplitResult, path: str) -> bytes:
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    try:
        connection.request("GET", path, headers={"Cookie": f"shoal-watch-{address.port}={address.query[6:]}"})
        return connection.getresponse().read()
    finally:
        connection.close()


def main() -> None:
    """Prints what was measured."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ranks", type=int, default=2000)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--json", action="store_true")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(Path(folder) / "run", ranks=chosen.ranks, steps=chosen.steps)
    checks = [
        {"name": name, "value": row[name], "bound": bound, "holds": row[name] < bound}
        for name, bound in (("answer_s", PAGE_BOUND_S), ("peak_bytes", MEMORY_BOUND_BYTES))
    ]
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    found = {"bench": "watch", "machine": machine, "rows": [row], "checks": checks}
    print(json.dumps(found) if chosen.json else "\n".join(f"{name}: {value:,}" for name, value in row.items()))


if __name__ == "__main__":
    main()
