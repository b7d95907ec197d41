"""`python -m benchmarks.memory_start`: the memory of four ranks while a model starts that none of them builds whole.

Each rank reads its own anonymous and shared memory from the kernel (`/proc/self/status`) a thousand times a second from
before the model is built until its first values are there; files that are mapped into memory are left out, as the
kernel may drop them at any time. A rank's part is what it keeps: a quarter of the parameters and of the gradients. With
`--parameters disk` that part is such a file: `all` are the most bytes of a rank with those pages of it that the kernel
had room for. The
same start with `memory.build = "whole"` is the peer: what FSDP's users get whose module is built before it is divided.
Each start has processes of its own, which have built a tiny model before, so that what is imported is not counted.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer
from torch._C._distributed_c10d import PrefixStore

from benchmarks.command import run
from shoal import units
from shoal.assembly.run import open_run
from shoal.bench.groups import join_store
from shoal.bench.options import AsJson
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, Row, check, merged, print_report
from shoal.launcher.environment import Place
from shoal.runfile.run_file import RunFile

RANKS, BOUND, TINY = 4, 1.2, 256
FEED_FORWARD = 11008 / 4096
"""Of Llama 7B, as its vocabulary of 32000 and its 32 layers at a width of 4096."""


class Held(NamedTuple):
    """Bytes of anonymous and shared memory, and with those of mapped files."""

    own: int
    all: int


@dataclass
class Peak:
    """Bytes of this process: at the beginning, and the most since; `all_most` with mapped files."""

    before: Held
    most: int = 0
    all_most: int = 0

    def look(self) -> None:
        """At what is held now."""
        held = _held()
        self.most = max(self.most, held.own - self.before.own)
        self.all_most = max(self.all_most, held.all - self.before.all)


def memory_start(
    width: Annotated[int, typer.Option(help="Of the model; 4096 is 7B.", min=128)] = 1024,
    parameters: Annotated[str, typer.Option(help="memory.offload.parameters: device, host or disk.")] = "device",
    folder: Annotated[Path | None, typer.Option(help="Of spill files; default: a temporary one.")] = None,
    only: Annotated[str | None, typer.Option(help="One start, by its name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Peak memory of four ranks under ZeRO-3 while a model of Llama 7B's proportions starts.

    Example: python -m benchmarks.memory_start --width 1024
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, str(only), width=width, parameters=parameters, spill=folder))
        return
    names = [name for name, _, _ in _models(width) if only in (None, name)]
    command = ["benchmarks.memory_start", "--width", str(width), "--parameters", parameters]
    command += [*([] if folder is None else ["--folder", str(folder)]), "--only"]
    found = [on_ranks([*command, name], processes=RANKS) for name in names]
    print_report("memory_start", merged(found), as_json=as_json)


def measure(place: Place, name: str, *, width: int, parameters: str, spill: Path | None) -> Result | None:
    """The row of one start. None on all ranks but rank 0."""
    store = join_store(place)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        tokens = Path(folder) / "tokens.bin"
        np.zeros(1 << 14, np.uint8).tofile(tokens)
        _, model, build = next(each for each in _models(width) if each[0] == name)
        _, tiny, _ = next(each for each in _models(TINY) if each[0] == name)
        offload: dict[str, Any] = {"parameters": parameters, "folder": None if spill is None else str(spill)}
        if parameters != "device":
            offload["optimizer"] = parameters
        memory = {"zero": 3, "build": build, "offload": offload}
        open_run(_run_file(Path(folder), tiny, memory), place, store=PrefixStore("tiny", store)).end()
        row = _row(name, _run_file(Path(folder), model, memory), place, PrefixStore("start", store))
    checks = []
    if build != "whole":
        said = f"peak of the start, {name}, of a rank's part"
        checks.append(check(said, float(row["of_part"]), BOUND, at_most=True))
    return {"rows": [row], "checks": checks} if place.rank == 0 else None


def _models(width: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, table of the model, memory.build)"""
    layers, hidden, vocabulary = width // 128, int(width * FEED_FORWARD), int(32000 * width / 4096)
    yield (
        "Shoal's GPT",
        {"kind": "gpt", "vocabulary": vocabulary, "layers": layers, "width": width, "heads": width // 128,
         "feed_forward": "swiglu", "feed_forward_width": hidden},
        "auto",
    )  # fmt: skip
    config = {
        "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": hidden,
        "num_attention_heads": width // 128, "num_key_value_heads": width // 128,
    }  # fmt: skip
    llama = {"kind": "transformers", "architecture": "LlamaForCausalLM", "config": config}
    yield "Llama of transformers", llama, "parts"
    yield "Llama of transformers, whole", llama, "whole"


def _run_file(folder: Path, model: dict[str, Any], memory: dict[str, Any]) -> RunFile:
    tables = {
        "run": {"name": "start", "steps": 2, "directory": str(folder / "run"), "processes": RANKS, "device": "cpu"},
        "model": model,
        "data": {"kind": "tokens", "path": str(folder / "tokens.bin"), "dtype": "uint8"},
        "batch": {"global_samples": RANKS, "sequence": 64},
        "layout": {"shard": RANKS},
        "memory": memory,
    }
    return msgspec.convert(tables, RunFile)


def _row(name: str, file: RunFile, place: Place, store: PrefixStore) -> Row:
    begin_s = time.perf_counter()
    with _watched() as peak:
        one = open_run(file, place, store=store)
    seconds = time.perf_counter() - begin_s
    part_bytes = 2 * sum(each.parameter.nbytes for each in one.generation.gradients.owned)
    store.set(f"peak-{place.rank}", f"{peak.most} {peak.all_most}")
    most, all_most = zip(
        *(map(int, store.get(f"peak-{rank}").split()) for rank in range(place.world_size)), strict=True
    )
    one.mesh.world.barrier().wait()  # rank 0 keeps the store that the others still read
    parameters = sum(int(np.prod(shape)) for shape in one.generation.parts.split.shapes.values())
    one.end()
    return {
        "model": name,
        "parameters_M": round(parameters / 1e6),
        "part": units.memory_size(part_bytes),
        "peak": units.memory_size(max(most)),
        "of_part": round(max(most) / part_bytes, 3),
        "all": units.memory_size(max(all_most)),
        "all_of_part": round(max(all_most) / part_bytes, 3),
        "start_s": round(seconds, 1),
    }


@contextmanager
def _watched() -> Iterator[Peak]:
    """The peak of what is computed inside."""
    peak, over = Peak(_held()), threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            peak.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
        peak.look()


def _held() -> Held:
    """Of this process."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    sizes = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
    return Held(sizes["RssAnon"] + sizes["RssShmem"], sum(sizes.values()))


if __name__ == "__main__":
    run(memory_start)
