"""Ranks without torch: each a Python process of its own, in which an import of torch raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.waiting import HANG_S

POISON = "import sys; sys.modules['torch'] = None\n"
PRELUDE = f"import json, os\nimport numpy as np\nfrom shoal import wire\ngroup = wire.init(timeout_s={HANG_S})\n"
EPILOGUE = "\nprint('RESULT ' + json.dumps(result))\n"


def ranks_of(world: int, *, hosts: Sequence[str] = (), folder: str) -> list[dict[str, str]]:
    """The environment of each rank, as a launcher sets it; `hosts` are names that the machine plays."""
    port = str(free_port())
    place = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = {"SHOAL_JOB_TOKEN": str(Path(folder) / "token"), "OMP_NUM_THREADS": "1"}
    return [
        {**os.environ, **place, **own, "RANK": str(rank), "LOCAL_RANK": str(rank),
         **({"SHOAL_HOST": hosts[rank]} if hosts else {})}
        for rank in range(world)
    ]  # fmt: skip


def started(codes: Sequence[str], *, hosts: Sequence[str] = (), folder: str) -> list[subprocess.Popen[str]]:
    """A process for each of `codes`, which are Python."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for code, environ in zip(codes, ranks_of(len(codes), hosts=hosts, folder=folder), strict=True)
    ]  # fmt: skip


def said_by(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Standard output and error of each, once it has ended; none of them stays."""
    try:
        return [process.communicate(timeout=HANG_S) for process in processes]
    finally:
        for process in processes:
            process.kill()


def run_codes(codes: Sequence[str], *, hosts: Sequence[str] = ()) -> list[Any]:
    """What each rank left in `result`. Raises `AssertionError` with the output of one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        processes = started(codes, hosts=hosts, folder=folder)
        said = said_by(processes)
    for rank, (process, (out, err)) in enumerate(zip(processes, said, strict=True)):
        assert process.returncode == 0, f"rank {rank}: {out}\n{err}"
    lines = [[line for line in out.splitlines() if line.startswith("RESULT ")][-1] for out, _ in said]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def run(world: int, body: str, *, hosts: Sequence[str] = ()) -> list[Any]:
    """`body` on ranks without torch, with `group` and `np` at hand; see `run_codes`."""
    return run_codes([POISON + PRELUDE + body + EPILOGUE] * world, hosts=hosts)
