"""`python -m benchmarks.gpu`: a step of Shoal on one GPU beside a plain PyTorch loop; `make gpu` calls it.

A user's own GPT, bfloat16 autocast, fused AdamW, clipping. All sides take blocks of steps in turn in one process:

    plain, plain compiled      a loop as a careful person writes it, batches in pinned memory
    shoal, shoal compiled      `shoal train`'s step; compiled with the loss
    shoal blocks               each block compiled by itself, as under ZeRO-3
    shoal graphs               compiled, and launched as CUDA graphs
    masters                    bfloat16 weights with float32 masters, compiled
    float8                     the blocks' linear layers in float8, compiled
    adamw 8 bit                moments in 8 bits, whose step is compiled, too
    2:4 masks, 2:4             two of every four weights of the blocks, with dense products as `shoal`, and with those
                               of the kept half, forward and backward

ZeRO-3 itself divides a model over ranks of a GPU each: one GPU cannot show it, and the table says so. Model FLOPs count
attention once below the diagonal (half of 12 L D T a token). Figures are kept by card, and compared with those of the
same card alone.

With `--kernels` it times codecs and AdamW's steps on 25 million numbers instead, each compiled beside its torch form.

With `--layouts` it writes another table: what `shoal verify` says of each layout, two ranks on the one GPU over Gloo.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import TensorDataset

from benchmarks.command import run
from benchmarks.host_overhead import CLIP_NORM, adamw, loss_of
from benchmarks.own_gpt import build
from shoal.assembly.objects import UserObjects
from shoal.assembly.run import open_run
from shoal.bench.groups import repeat
from shoal.bench.report import machine_facts
from shoal.bench.training_job import ENDLESS, LR, Training, training_job
from shoal.codec.config import BlockwiseConfig, CodecConfig, SignConfig, TopKConfig
from shoal.codec.kernels import compiled
from shoal.codec.quantise import Quantised
from shoal.codec.top_k import exceeding
from shoal.config.check import implementation_of
from shoal.config.named import GIVEN
from shoal.engine.loop import take_step
from shoal.errors import EnvironmentFault, ShoalError
from shoal.launcher.environment import Place
from shoal.optim.adamw_8bit import EightBitAdamW
from shoal.optim.fused import FusedAdamW
from shoal.runfile.run_file import RunFile

PLAIN, SHOAL = "plain", "shoal"
COMPILED = {PLAIN: "plain compiled", SHOAL: "shoal compiled"}
SIDES: Mapping[str, tuple[bool | str, str, str, str]] = {
    SHOAL: (False, "bfloat16", "adamw", "default"),
    COMPILED[SHOAL]: (True, "bfloat16", "adamw", "default"),
    "shoal blocks": ("blocks", "bfloat16", "adamw", "default"),
    "shoal graphs": (True, "bfloat16", "adamw", "reduce-overhead"),
    "masters": (True, "bfloat16_params", "adamw", "default"),
    "float8": (True, "float8", "adamw", "default"),
    "adamw 8 bit": (True, "bfloat16", "adamw_8bit", "default"),
}
"""Shoal's sides: `run.compile`, `precision.kind`, `optimizer.kind` and `run.compile_mode`."""
TWO_OF_FOUR = {"kind": "magnitude", "pattern": "2:4", "transposable": True, "schedule": {"shape": "one_shot"}}
MASKED: Mapping[str, dict[str, Any]] = {
    "2:4 masks": {"sparsity": TWO_OF_FOUR},
    "2:4": {"sparsity": TWO_OF_FOUR | {"products": "semi_structured"}},
}
"""Further sides, as `shoal` is but for these tables."""
PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16 products a second, from NVIDIA's data sheets, by a part of the card's name."""
OVER = "not begun: the seconds of this measurement were over"
NOT_HERE = {"ZeRO-3 compiled": "it divides a model over ranks of a GPU each, and one GPU is measured"}
ROWS = 512


@dataclass(frozen=True)
class Size:
    """A model and a batch of it."""

    layers: int
    width: int
    vocabulary: int
    samples: int
    tokens: int

    @property
    def flops(self) -> float:
        """Of a step: forward and backward."""
        weights = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        return (6 * weights + 6 * self.layers * self.width * self.tokens) * self.samples * self.tokens


SMALL, DRY = Size(12, 768, 50304, 16, 1024), Size(2, 32, 64, 2, 16)


@dataclass(frozen=True)
class Setting:
    """Where it is measured, and of what size."""

    device: torch.device
    size: Size
    folder: Path
    stack: ExitStack

    def model(self) -> nn.Module:
        """The same weights on every side."""
        torch.manual_seed(0)
        size = self.size
        heads = max(1, size.width // 64)
        model = build(
            vocabulary=size.vocabulary, sequence=size.tokens, width=size.width, heads=heads, layers=size.layers
        )
        return model.to(self.device)

    def data(self) -> Tensor:
        """Rows of tokens, one more than a sequence has."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.size.vocabulary, (ROWS, self.size.tokens + 1), generator=generator)

    def synchronize(self) -> None:
        """Returns when the device has done all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def gpu(
    out: Annotated[Path | None, typer.Option(help="The file of figures, by card; default: standard output.")] = None,
    turns: Annotated[int, typer.Option(help="Turns of all sides.", min=2)] = 8,
    block: Annotated[int, typer.Option(help="Steps in a row of one side.", min=1)] = 5,
    kernels: Annotated[bool, typer.Option("--kernels", help="Time codecs and optimizers instead of steps.")] = False,
    limit_s: Annotated[float, typer.Option(help="Seconds after which no further side is begun.", min=0)] = 100.0,
    layouts: Annotated[
        Path | None, typer.Option(help="Write the table of layouts to this page, and nothing else.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on the CPU, nothing compiled.")] = False,
) -> None:
    """A step of Shoal on one GPU beside a plain PyTorch loop, eager, compiled and in float8.

    Example: python -m benchmarks.gpu --out docs/benchmarks/gpu.json
    """
    if not dry_run:
        require_gpu()
    device = torch.device("cpu" if dry_run else "cuda")
    card = "dry run" if dry_run else torch.cuda.get_device_name()
    if layouts is not None:
        chosen = {name: LAYOUTS[name] for name in list(LAYOUTS)[:2]} if dry_run else LAYOUTS
        layouts.write_text(page(card, {name: verified(keys, device.type) for name, keys in chosen.items()}))
        return
    with ExitStack() as stack:
        if dry_run:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        setting = Setting(device, DRY if dry_run else SMALL, folder, stack)
        end_s = time.monotonic() + limit_s
        if kernels:
            found = {"kernels": time_kernels(setting, turns=turns, end_s=end_s)}
        else:
            rows = measure(setting, card, turns=turns, block=block, end_s=end_s)
            found = {"machine": machine_facts(), "rows": rows, "not_measured": NOT_HERE}
    earlier = json.loads(out.read_text()) if out is not None and out.exists() else {}
    for line in compared(earlier, card, found):
        typer.echo(line, err=True)
    text = json.dumps({**earlier, card: {**earlier.get(card, {}), **found}}, indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text)


def require_gpu() -> None:
    """Raises `EnvironmentFault` where PyTorch has no GPU."""
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            f"this needs an NVIDIA GPU and a PyTorch with CUDA, and torch {torch.__version__} sees none here: run it "
            "on a machine with one, or with --dry-run to see what it does"
        )


def measure(setting: Setting, card: str, *, turns: int, block: int, end_s: float) -> list[dict[str, Any]]:
    """A row for each side: the median of its steps. A side that cannot run says why; none is begun after `end_s`."""
    opens: dict[str, Callable[[], Callable[[], Any]]] = {
        PLAIN: partial(plain, setting, compiled=False),
        COMPILED[PLAIN]: partial(plain, setting, compiled=True),
    }
    sides = {name: (keys, {}) for name, keys in SIDES.items()}
    sides |= {name: (SIDES[SHOAL], tables) for name, tables in MASKED.items()}
    for name, (keys, tables) in sides.items():
        opens[name] = partial(trained, setting, name.replace(" ", "-").replace(":", "-"), *keys, **tables)
    made: dict[str, Callable[[], Any]] = {}
    start_s: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, opened in opens.items():
        if time.monotonic() > end_s and name in sides:
            refused[name] = OVER
            continue
        try:
            step = opened()
            start_s[name] = _seconds(setting, partial(repeat, step, 3))
        except (ShoalError, RuntimeError) as error:  # what one side's compiler or memory refuses is not the others' end
            refused[name] = str(error).partition("\n")[0]
        else:
            made[name] = step
    took_s: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(turns):
        for name, step in made.items():
            took_s[name].append(_seconds(setting, partial(repeat, step, block)) / block)
    rows = [_row(setting.size, card, name, statistics.median(took_s[name]), start_s[name]) for name in made]
    return rows + [{"side": name, "refused": why} for name, why in refused.items()]


def plain(setting: Setting, *, compiled: bool) -> Callable[[], Any]:
    """The peer, without Shoal."""
    model, rows = setting.model(), setting.data()
    rows = rows.pin_memory() if setting.device.type == "cuda" else rows
    optimizer, parameters = adamw(model), list(model.parameters())
    called: Any = torch.compile(model) if compiled else model
    samples, number = setting.size.samples, 0

    def step() -> Tensor:
        nonlocal number
        first = number * samples % (ROWS - samples)
        batch = rows[first : first + samples].to(setting.device, non_blocking=True)
        number += 1
        with torch.autocast(setting.device.type, dtype=torch.bfloat16):
            loss = loss_of(called, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def trained(
    setting: Setting,
    name: str,
    compiles: bool | str,
    precision: str,
    optimizer: str,
    mode: str = "default",
    **tables: Any,
) -> Callable[[], Any]:
    """The body of the loop of `shoal train`, with further `tables`. Raises what opening the run does."""
    (folder := setting.folder / name).mkdir()
    given, device = {"kind": "python", "build": GIVEN}, setting.device.type
    own = {"name": "gpu", "steps": ENDLESS, "directory": str(folder), "processes": 1, "device": device}
    run_file = msgspec.convert(
        {
            "run": own | {"compile": compiles} | ({"compile_mode": mode} if compiles else {}),
            "model": given,
            "data": given,
            "batch": {"global_samples": setting.size.samples},
            "precision": {"kind": precision},
            "optimizer": {"kind": optimizer, "lr": LR, "beta2": 0.95, "weight_decay": 0.1, "clip_norm": CLIP_NORM},
            "checkpoint": {"every_steps": 0},
            **tables,
        },
        RunFile,
    )
    rows = setting.data()
    data = TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    place = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, launcher="shoal")
    opened = open_run(run_file, place, UserObjects(model=setting.model(), data=data), store=HashStore())
    setting.stack.callback(opened.generation.gradients.close)
    training = Training(opened, setting.stack.enter_context(opened.feed()))
    return partial(take_step, training_job(training, folder, setting.stack))


def compared(earlier: Mapping[str, Any], card: str, found: Mapping[str, Any]) -> list[str]:
    """Sentences about each side beside the last figures of the same card. Those of other cards are not compared."""
    if "rows" not in found:
        return []
    if card not in earlier:
        others = ", ".join(earlier)
        return [f"the figures of {others} are not compared with those of {card}: cards differ"] if others else []
    before = {row["side"]: row.get("ms") for row in earlier[card].get("rows", ())}
    return [
        f"{row['side']}: {row['ms']} ms, {before[row['side']]} ms before"
        for row in found["rows"]
        if "ms" in row and before.get(row["side"]) is not None
    ]


def _row(size: Size, card: str, side: str, step_s: float, start_s: float) -> dict[str, Any]:
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)
    row = {"side": side, "ms": round(1e3 * step_s, 3), "tokens_s": round(size.samples * size.tokens / step_s)}
    row |= {"first_steps_s": round(start_s, 2)}
    return row if peak is None else row | {"mfu": round(size.flops / step_s / peak, 4)}


def _seconds(setting: Setting, work: Callable[[], Any]) -> float:
    setting.synchronize()
    begin_s = time.perf_counter()
    work()
    setting.synchronize()
    return time.perf_counter() - begin_s


# Codecs and steps of AdamW by themselves: what a bucket of gradients costs to code, and what moments in 8 bits cost.
#
# Milliseconds of 25 million numbers, beside the torch form that is the oracle (operator by operator) and beside a copy
# of the same numbers, which is as fast as memory allows.


NUMBERS, FEW_NUMBERS = 25 << 20, 1 << 14
CODECS: Mapping[str, CodecConfig] = {
    "int8": BlockwiseConfig(bits=8, rounding="nearest"),
    "sign": SignConfig(),
    "top 1 %, exact": TopKConfig(),
    "top 1 %, sampled": TopKConfig(selection="sampled"),
}


def time_kernels(setting: Setting, *, turns: int, end_s: float) -> list[dict[str, Any]]:
    """A row for each codec's encoding and decoding, and for AdamW's step with moments in 32 bits and in 8."""
    numel = FEW_NUMBERS if setting.device.type == "cpu" else NUMBERS
    x = torch.randn(numel, device=setting.device, generator=torch.Generator(setting.device).manual_seed(0))
    took_ms = partial(_milliseconds, setting, turns)
    rows = [{"kernel": "copy", "ms": took_ms(x.clone)}]
    for name, config in CODECS.items():
        if time.monotonic() > end_s:
            rows.append({"kernel": name, "refused": OVER})
            continue
        codec = implementation_of(config)(config)
        payload = codec.encode(x, key=0)
        row = {"kernel": name, "encode_ms": took_ms(partial(codec.encode, x, key=0))}
        row["decode_ms"] = took_ms(partial(codec.decode, payload, numel, key=0))
        if isinstance(codec, Quantised):
            row["encode_in_torch_ms"] = took_ms(partial(codec.encode_in_torch, x, 0))
            row["decode_in_torch_ms"] = took_ms(partial(codec.decode_in_torch, payload, numel, torch.float32))
        rows.append(row)
    least = torch.ones((), device=setting.device)
    rows.append({"kernel": "top k, selection", "ms": took_ms(partial(compiled(exceeding), x, least))})
    rows[-1]["in_torch_ms"] = took_ms(partial(exceeding, x, least))
    for name, kind in (("AdamW", FusedAdamW), ("AdamW, 8 bit", EightBitAdamW)):
        parameter = nn.Parameter(x.clone())
        parameter.grad = torch.ones_like(x)
        optimizer = kind([{"params": [parameter]}], lr=LR, betas=(0.9, 0.95), eps=1e-8)
        rows.append({"kernel": name, "ms": took_ms(optimizer.step)})
    return rows


def _milliseconds(setting: Setting, turns: int, work: Callable[[], Any]) -> float:
    """The median, after a call that may compile."""
    work()
    return round(1e3 * statistics.median(_seconds(setting, work) for _ in range(turns)), 4)


# Every layout's code on tensors of a GPU: what `shoal verify` says of it.


LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one rank": ("run.processes=1",),
    "replicated": ("layout.replicate=2",),
    "ZeRO-1": ("layout.shard=2", "memory.zero=1"),
    "ZeRO-2": ("layout.shard=2", "memory.zero=2"),
    "ZeRO-3": ("layout.shard=2", "memory.zero=3"),
    "ZeRO-3, masters": ("layout.shard=2", "memory.zero=3", "precision.kind=bfloat16_params"),
    "ZeRO-3, compiled blocks": ("layout.shard=2", "memory.zero=3", "run.compile=blocks"),
    "tensor": ("layout.tensor=2",),
    "tensor, sequence parallel": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "pipeline": ("layout.pipeline=2",),
    "context": ("layout.context=2",),
    "experts": ("layout.shard=2", "layout.expert=2", "memory.zero=1", "model.kind=moe", "model.experts=4"),
    "int8 gradients": ("layout.replicate=2", "codec.kind=blockwise"),
    "moments in 8 bits": ("layout.shard=2", "memory.zero=1", "optimizer.kind=adamw_8bit"),
    "local steps": ("layout.replicate=2", "sync.kind=local", "sync.period=2"),
    "bfloat16": ("layout.replicate=2", "precision.kind=bfloat16"),
}
RUN = """
[run]
name = "layouts"
steps = 10
[model]
kind = "gpt"
layers = 2
width = 64
heads = 4
vocabulary = 256
[data]
kind = "stdlib"
[batch]
global_samples = 8
sequence = 64
"""
LIMIT_S = 90.0


def verified(keys: tuple[str, ...], device: str) -> str:
    """The last sentence of `shoal verify` of a small GPT under `keys`: that it is the same model, or why not."""
    shares = ("run.share_gpus=true", "wire.transport=gloo") if device == "cuda" else ()
    own = () if any(key.startswith("run.processes") for key in keys) else ("run.processes=2",)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        Path(folder, "run.toml").write_text(RUN)
        command = [sys.executable, "-m", "shoal", "verify", "run.toml", f"run.device={device}", *shares, *own, *keys]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env=_with_paths()
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {LIMIT_S:.0f} s"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}, and nothing said"


def _with_paths() -> dict[str, str]:
    """The environment, in which another folder finds the modules that this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)}


def page(card: str, said: Mapping[str, str]) -> str:
    """The table in Markdown."""
    head = (
        f"# Layouts on a GPU\n\nWritten by `make gpu` on {card}, torch {torch.__version__}: what `shoal verify` says "
        "of a small GPT on tensors of the GPU. Two ranks share it over Gloo (`run.share_gpus`), a test mode that shows "
        "whether a layout's code runs there and computes what one process computes, not how fast.\n\n"
        "| layout | keys | |\n|---|---|---|\n"
    )
    return head + "".join(f"| {name} | `{' '.join(LAYOUTS[name])}` | {what} |\n" for name, what in said.items())


if __name__ == "__main__":
    run(gpu)
