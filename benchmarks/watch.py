"""A run of 2,000 ranks: the live page, the report and the Prometheus endpoint, each in a process of its own.

The page: the time to its first figures and to answer a request, its memory. The endpoint: the first scrape, which reads
all events, and later ones. The report reads the same files once and does not follow them; it is the peer of the other
two in the time that reading takes.

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
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.many_ranks import write_many

PAGE_BOUND_S, MEMORY_BOUND_BYTES = 1.0, 200e6
_ENDPOINT = """
import sys
from pathlib import Path
from shoal.observe.sink import Ending
from shoal.observe.prometheus import PrometheusSink
from shoal.observe.sink import RunStart
sink = PrometheusSink(Path(sys.argv[1]), ("127.0.0.1", 0), ranks=None, note=lambda text: print(text, flush=True),
                      warn=sys.exit)
sink.start(RunStart(name="many", total_steps=1))
sys.stdin.read()
sink.finish(Ending("finished"))
"""


def measure(directory: Path, *, ranks: int, steps: int) -> dict[str, Any]:
    """Seconds and bytes of `shoal watch`, of the endpoint and of the report on a run of that size."""
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
        peak_bytes = _peak_bytes(watching.pid)
    finally:
        watching.terminate()
        watching.wait()
    return {
        "ranks": ranks, "steps": steps, "events_bytes": written_bytes, "ready_s": ready_s, "answer_s": max(answers),
        "answer_bytes": size_bytes, "peak_bytes": peak_bytes, **_endpoint(directory), **_report(directory),
    }  # fmt: skip


def _endpoint(directory: Path) -> dict[str, float]:
    """Seconds and bytes of the Prometheus endpoint of all ranks."""
    command = [sys.executable, "-c", _ENDPOINT, str(directory)]
    serving = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        address = serving.stdout.readline().split(": ", 1)[1].strip()
        seconds, size_bytes = [], 0
        for _ in range(4):
            begin_s = time.perf_counter()
            with urllib.request.urlopen(address, timeout=120) as answer:
                size_bytes = len(answer.read())
            seconds.append(time.perf_counter() - begin_s)
        peak_bytes = _peak_bytes(serving.pid)
    finally:
        serving.communicate("")
    return {
        "first_scrape_s": seconds[0], "scrape_s": max(seconds[1:]), "scrape_bytes": size_bytes,
        "endpoint_peak_bytes": peak_bytes,
    }  # fmt: skip


def _report(directory: Path) -> dict[str, float]:
    """Seconds and bytes of `shoal report`, and the size of what it writes."""
    begin_s = time.perf_counter()
    writing = subprocess.Popen([sys.executable, "-m", "shoal", "report", str(directory)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(writing.pid, 0)
    if status:
        raise RuntimeError(f"shoal report ended with status {status}")
    return {
        "report_s": time.perf_counter() - begin_s, "report_bytes": (directory / "report.html").stat().st_size,
        "report_peak_bytes": 1024 * usage.ru_maxrss,
    }  # fmt: skip


def _peak_bytes(pid: int) -> int:
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])


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
        for name, bound in (
            ("answer_s", PAGE_BOUND_S),
            ("peak_bytes", MEMORY_BOUND_BYTES),
            ("scrape_s", PAGE_BOUND_S),
            ("endpoint_peak_bytes", MEMORY_BOUND_BYTES),
            ("report_peak_bytes", MEMORY_BOUND_BYTES),
        )
    ]
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    found = {"bench": "watch", "machine": machine, "rows": [row], "checks": checks}
    print(json.dumps(found) if chosen.json else "\n".join(f"{name}: {value:,}" for name, value in row.items()))


if __name__ == "__main__":
    main()
