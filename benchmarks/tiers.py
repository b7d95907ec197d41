"""`python -m benchmarks.tiers`: steps of a GPT whose state or activations live elsewhere, beside the same run without.

All runs are of one process and take their steps in turn, so that whatever else the machine does strikes all of them:
plain, plain once more (A/A), and the homes. Peaks and losses are those of a second pass, in which a simulated device
counts. PyTorch's `save_on_cpu` is no peer here: on a CPU it moves nothing.

Where DeepSpeed is installed, its engine takes steps of the same model in the same turns, under ZeRO-3: as it is, and
with `offload_optimizer` on the CPU and its own AdamW for it, which it compiles when it is first asked for. Each is held
against its own plain step. Its offload to NVMe is tried, and left out where its `async_io` cannot be built (it needs
libaio); the reason is said.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch._C._distributed_c10d import HashStore

from benchmarks.command import run
from shoal import units
from shoal.assembly.run import Run, open_run
from shoal.bench.options import AsJson
from shoal.bench.report import Result, Row, check, print_report
from shoal.launcher.environment import Place
from shoal.memory.streamed_state import LEAST_BYTES
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.runfile.run_file import RunFile

HOMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain again": {},
    "optimizer on the host": {"offload": {"optimizer": "host"}},
    "optimizer on disk": {"offload": {"optimizer": "disk"}},
    "optimizer on the host, delayed": {"offload": {"optimizer": "host", "delay_update_after": 0}},
    "activations on the host": {"offload": {"activations": "host"}},
    "activations in 8 bits": {"offload": {"activation_bits": 8}},
    "recompute": {"recompute": "full"},
    "all on disk and host": {"recompute": "full", "offload": {"optimizer": "disk", "activations": "host"}},
    "parameters on the host": {"offload": {"optimizer": "host", "parameters": "host"}},
    "parameters on disk": {"offload": {"optimizer": "disk", "parameters": "disk"}},
}
PEERS: dict[str, dict[str, Any]] = {
    "DeepSpeed": {},
    "DeepSpeed, optimizer on the host": {"device": "cpu"},
    "DeepSpeed, optimizer on disk": {"device": "nvme"},
}
HOST_BOUND, DISK_BOUND, BYTES_BOUND = 1.25, 1.6, 0.02
BYTES_OF_MOMENTS = 8
OTHER_LOSSES = ("activations in 8 bits", "optimizer on the host, delayed")


def tiers(
    width: Annotated[int, typer.Option(help="Of the GPT.", min=64)] = 512,
    layers: Annotated[int, typer.Option(help="Of the GPT.", min=1)] = 4,
    samples: Annotated[int, typer.Option(help="Of a step.", min=1)] = 8,
    sequence: Annotated[int, typer.Option(help="Tokens of a sample.", min=16)] = 256,
    turns: Annotated[int, typer.Option(help="Steps of each run.", min=2)] = 5,
    part: Annotated[str, typer.Option(help="memory.offload.part.")] = "4 MiB",
    folder: Annotated[Path | None, typer.Option(help="Of the spill files; default: a temporary one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time, peak and moved bytes of a step whose state or activations live elsewhere.

    Example: python -m benchmarks.tiers --turns 3
    """
    torch.set_num_threads(1)
    sizes = {"width": width, "layers": layers, "heads": max(1, width // 64)}
    batch = {"global_samples": samples, "micro_samples": max(1, samples // 2), "sequence": sequence}
    with tempfile.TemporaryDirectory(dir=folder) as made:
        result = measure(Path(made), sizes, batch, turns=turns, part=part)
    print_report("tiers", result, as_json=as_json)


def measure(folder: Path, sizes: dict[str, int], batch: dict[str, int], *, turns: int, part: str) -> Result:
    """A row for each home."""
    draws = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    (folder / "tokens.bin").write_bytes(draws.tobytes())
    files = {name: _run_file(folder, name, sizes, batch, home, part) for name, home in HOMES.items()}
    seconds = _in_turn(files, turns, _peers(folder, sizes, batch))
    counted = {name: _counted(file) for name, file in files.items()}
    rows = [_row(name, seconds, counted) for name in HOMES]
    rows += [
        {"home": name, "step_s": round(statistics.median(seconds[name]), 4),
         "of_plain": round(_ratio(seconds, name, plain="DeepSpeed"), 3)}
        for name in PEERS if name in seconds
    ]  # fmt: skip
    state_bytes = counted["plain"]["state_bytes"]
    checks = [
        check("a step with the optimizer on the host, of the plain one", _ratio(seconds, "optimizer on the host"),
              HOST_BOUND, at_most=True),
        check("a step with the optimizer on disk (O_DIRECT), of the plain one", _ratio(seconds, "optimizer on disk"),
              DISK_BOUND, at_most=True),
        *(check(f"bytes moved, {name}, off the closed form",
                abs(counted[name]["memory/to_device_bytes"] / state_bytes - 1), BYTES_BOUND, at_most=True)
          for name in ("optimizer on the host", "optimizer on disk")),
        *(check(f"losses that differ, {name}", float(found["losses"] != counted["plain"]["losses"]), 0.0, at_most=True)
          for name, found in counted.items() if name not in OTHER_LOSSES),
    ]  # fmt: skip
    return {"rows": rows, "checks": checks}


def _run_file(
    folder: Path, name: str, sizes: dict[str, int], batch: dict[str, int], home: dict[str, Any], part: str
) -> RunFile:
    memory = {**home, "offload": {**home.get("offload", {}), "part": part, "folder": str(folder)}}
    tables = {
        "run": {"name": "tiers", "steps": 100, "directory": str(folder / name.replace(" ", "-"))},
        "model": {"kind": "gpt", "vocabulary": 256, **sizes},
        "data": {"kind": "tokens", "path": str(folder / "tokens.bin"), "dtype": "uint8"},
        "batch": batch,
        "optimizer": {"kind": "adamw"},
        "memory": memory,
    }
    return msgspec.convert(tables, RunFile)


def _opened(file: RunFile) -> Run:
    return open_run(file, Place(0, 1, 0, 1, 0, "shoal"), store=HashStore())


def _steps(one: Run) -> Iterator[float]:
    """Takes steps; their losses."""
    feed = one.feed()
    while True:
        fed = feed.next()
        one.state.progress.advance(fed.interval)
        yield one.step(one.state.progress.step, fed.microbatches, lr=1e-3).loss


def _peers(folder: Path, sizes: dict[str, int], batch: dict[str, int]) -> dict[str, Iterator[float]]:
    """Those that run here; why others do not is printed."""
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is left out: pip install deepspeed", file=sys.stderr)
        return {}
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    found: dict[str, Iterator[float]] = {}
    for name, offload in PEERS.items():
        try:
            found[name] = _deepspeed_steps(folder, sizes, batch, offload)
        except RuntimeError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def _deepspeed_steps(
    folder: Path, sizes: dict[str, int], batch: dict[str, int], offload: dict[str, Any]
) -> Iterator[float]:
    import deepspeed  # pyright: ignore[reportMissingImports]

    model = build(msgspec.convert({"vocabulary": 256, **sizes}, GPTConfig))
    initialise(model, seed=0, device="cpu")
    micro, sequence = batch["micro_samples"], batch["sequence"]
    rounds = batch["global_samples"] // micro
    home = {"offload_optimizer": {**offload, "nvme_path": str(folder)}} if offload else {}
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": rounds,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, **home},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "steps_per_print": 1 << 30,
        },
    )
    draws = torch.Generator().manual_seed(0)

    def steps() -> Iterator[float]:
        while True:
            loss = torch.zeros(())
            for _ in range(rounds):
                tokens = torch.randint(0, 256, (micro, sequence + 1), generator=draws)
                loss = F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                engine.backward(loss)
                engine.step()
            yield float(loss.detach())

    return steps()


def _in_turn(files: dict[str, RunFile], turns: int, peers: dict[str, Iterator[float]]) -> dict[str, list[float]]:
    """Seconds of the steps of every run, the first two left out: state is made in one, and read in the next."""
    runs = {name: _opened(file) for name, file in files.items()}
    steps = {name: _steps(one) for name, one in runs.items()} | peers
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns + 2):
        for name, own in steps.items():
            begin_s = time.perf_counter()
            next(own)
            seconds[name].append(time.perf_counter() - begin_s)
    for one in runs.values():
        one.end()
    return {name: found[2:] for name, found in seconds.items()}


def _counted(file: RunFile) -> dict[str, Any]:
    """The peak of the third step on a device that refuses nothing, what it moved, and all losses."""
    memory = msgspec.structs.replace(file.memory, simulate_device="1024 GiB")
    one = _opened(msgspec.structs.replace(file, memory=memory))
    own, losses, figures = _steps(one), [], {}
    for _ in range(3):
        losses.append(next(own))
        figures = one.tiers.take_figures()
    large = [p for p in one.model.parameters() if p.nbytes >= LEAST_BYTES]
    one.end()
    return {"losses": losses, "state_bytes": sum(BYTES_OF_MOMENTS * p.numel() for p in large), **figures}


def _ratio(seconds: dict[str, list[float]], name: str, *, plain: str = "plain") -> float:
    """The median of the ratios to the plain step of the same turn."""
    return statistics.median(own / without for own, without in zip(seconds[name], seconds[plain], strict=True))


def _row(name: str, seconds: dict[str, list[float]], counted: dict[str, dict[str, Any]]) -> Row:
    found = counted[name]
    return {
        "home": name,
        "step_s": round(statistics.median(seconds[name]), 4),
        "of_plain": round(_ratio(seconds, name), 3),
        "peak": units.memory_size(found["memory/device_peak_bytes"]),
        "peak_of_plain": round(found["memory/device_peak_bytes"] / counted["plain"]["memory/device_peak_bytes"], 3),
        "to_device": units.memory_size(found.get("memory/to_device_bytes", 0.0)),
        "to_host": units.memory_size(found.get("memory/to_host_bytes", 0.0)),
        "disk_read": units.memory_size(found.get("memory/disk_read_bytes", 0.0)),
        "exposed_s": round(found.get("memory/exposed_s", 0.0), 4),
    }


if __name__ == "__main__":
    run(tiers)
