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
same card alone. The file is written whenever a side has something new: what ends this process, as a kernel that reads
memory of others does, takes nothing that was measured before. `--sides first` measures those that say whether Shoal
costs speed, and nothing else; `others` the rest, beside what is in the file.

With `--kernels` it times codecs and AdamW's steps on 25 million numbers instead, each compiled beside its torch form.

With `--layouts` it writes another table: what `shoal verify` says of each layout (benchmarks/gpu_layouts.py).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import typer
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import TensorDataset

from benchmarks.command import run
from benchmarks.gpu_figures import Book, compared
from benchmarks.gpu_layouts import LAYOUTS, write_page
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
from shoal.errors import EnvironmentFault
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
FIRST = (PLAIN, COMPILED[PLAIN], SHOAL, COMPILED[SHOAL])
"""The sides that say whether Shoal costs speed. A fault of another cannot reach them: it runs in another process."""
PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16 products a second, from NVIDIA's data sheets, by a part of the card's name."""
OVER = "not begun: the seconds of this measurement were over"
LEAST_TURNS = 2
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
    sides: Annotated[Literal["all", "first", "others"], typer.Option(help="Which to measure.")] = "all",
    turns: Annotated[int, typer.Option(help="Turns of all sides.", min=LEAST_TURNS)] = 8,
    block: Annotated[int, typer.Option(help="Steps in a row of one side.", min=1)] = 5,
    kernels: Annotated[bool, typer.Option("--kernels", help="Time codecs and optimizers instead of steps.")] = False,
    limit_s: Annotated[float, typer.Option(help="Seconds after which nothing further is begun.", min=0)] = 100.0,
    layouts: Annotated[
        Path | None, typer.Option(help="Write the table of layouts to this page, and nothing else.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on the CPU, nothing compiled.")] = False,
) -> None:
    """A step of Shoal on one GPU beside a plain PyTorch loop, eager, compiled and in float8.

    Example: python -m benchmarks.gpu --out docs/benchmarks/gpu.json
    """
    end_s = time.monotonic() + limit_s
    if not dry_run:
        require_gpu()
    device = torch.device("cpu" if dry_run else "cuda")
    card = "dry run" if dry_run else torch.cuda.get_device_name()
    if layouts is not None:
        chosen = {name: LAYOUTS[name] for name in list(LAYOUTS)[:2]} if dry_run else LAYOUTS
        write_page(layouts, chosen, card=card, device=device.type, end_s=end_s)
        return
    facts = {"machine": machine_facts(), "not_measured": NOT_HERE}
    book = Book.of(out, card, keeps=kernels or sides == "others", facts=facts)
    with ExitStack() as stack:
        if dry_run:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        setting = Setting(device, DRY if dry_run else SMALL, folder, stack)
        if kernels:
            for row in time_kernels(setting, turns=turns, end_s=end_s):
                book.note("kernels", "kernel", [row])
        else:
            names = [name for name in openings(setting) if sides == "all" or (name in FIRST) == (sides == "first")]
            for rows in measure(setting, card, names, turns=turns, block=block, end_s=end_s):
                book.note("rows", "side", rows)
    for line in compared(book.before, card, book.measured):
        typer.echo(line, err=True)
    if out is None:
        typer.echo(book.text, nl=False)


def require_gpu() -> None:
    """Raises `EnvironmentFault` where PyTorch has no GPU."""
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            f"this needs an NVIDIA GPU and a PyTorch with CUDA, and torch {torch.__version__} sees none here: run it "
            "on a machine with one, or with --dry-run to see what it does"
        )


Step = Callable[[], Any]


def openings(setting: Setting) -> Mapping[str, Callable[[], Step]]:
    """What makes each side's step, those of `FIRST` first."""
    made: dict[str, Callable[[], Step]] = {
        PLAIN: partial(plain, setting, compiled=False),
        COMPILED[PLAIN]: partial(plain, setting, compiled=True),
    }
    sides = {name: (keys, {}) for name, keys in SIDES.items()}
    sides |= {name: (SIDES[SHOAL], tables) for name, tables in MASKED.items()}
    for name, (keys, tables) in sides.items():
        made[name] = partial(trained, setting, name.replace(" ", "-").replace(":", "-"), *keys, **tables)
    return made


def measure(
    setting: Setting, card: str, names: Sequence[str], *, turns: int, block: int, end_s: float
) -> Iterator[list[dict[str, Any]]]:
    """Rows of these sides, as far as they are known: after each side's first steps, and after each turn of all.

    A row has the median of the side's steps. A side that cannot run says why; none of Shoal's is begun after `end_s`,
    and no turn but the first ones.
    """
    opens, made = openings(setting), dict[str, Step]()
    start_s, took_s = dict[str, float](), dict[str, list[float]]()
    for name in names:
        if time.monotonic() > end_s and name not in (PLAIN, COMPILED[PLAIN]):
            yield [{"side": name, "refused": OVER}]
            continue
        try:
            step = opens[name]()
            start_s[name] = _seconds(setting, partial(repeat, step, 3))
            took_s[name] = [_seconds(setting, partial(repeat, step, block)) / block]
        except Exception as error:  # what one side's compiler or memory refuses is not the others' end
            yield [{"side": name, "refused": _said(error)}]
        else:
            made[name] = step
            yield [_row(setting.size, card, name, took_s[name][0], start_s[name])]
    for turn in range(turns):
        if turn >= LEAST_TURNS and time.monotonic() > end_s:
            return
        for name, step in made.items():
            took_s[name].append(_seconds(setting, partial(repeat, step, block)) / block)
        yield [_row(setting.size, card, name, statistics.median(took_s[name][1:]), start_s[name]) for name in made]


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


def _row(size: Size, card: str, side: str, step_s: float, start_s: float) -> dict[str, Any]:
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)
    row = {"side": side, "ms": round(1e3 * step_s, 3), "tokens_s": round(size.samples * size.tokens / step_s)}
    row |= {"first_steps_s": round(start_s, 2)}
    return row if peak is None else row | {"mfu": round(size.flops / step_s / peak, 4)}


def _said(error: Exception) -> str:
    """Its first line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
STEPS: Mapping[str, Any] = {"AdamW": FusedAdamW, "AdamW, 8 bit": EightBitAdamW}


def time_kernels(setting: Setting, *, turns: int, end_s: float) -> Iterator[dict[str, Any]]:
    """A row for each codec's encoding and decoding, and for AdamW's step with moments in 32 bits and in 8."""
    numel = FEW_NUMBERS if setting.device.type == "cpu" else NUMBERS
    x = torch.randn(numel, device=setting.device, generator=torch.Generator(setting.device).manual_seed(0))
    took_ms = partial(_milliseconds, setting, turns)

    def coded(config: CodecConfig) -> dict[str, float]:
        codec = implementation_of(config)(config)
        payload = codec.encode(x, key=0)
        row = {"encode_ms": took_ms(partial(codec.encode, x, key=0))}
        row["decode_ms"] = took_ms(partial(codec.decode, payload, numel, key=0))
        if isinstance(codec, Quantised):
            row["encode_in_torch_ms"] = took_ms(partial(codec.encode_in_torch, x, 0))
            row["decode_in_torch_ms"] = took_ms(partial(codec.decode_in_torch, payload, numel, torch.float32))
        return row

    def selected() -> dict[str, float]:
        least = torch.ones((), device=setting.device)
        ours = took_ms(partial(compiled(exceeding), x, least))
        return {"ms": ours, "in_torch_ms": took_ms(partial(exceeding, x, least))}

    def stepped(kind: Any) -> dict[str, float]:
        parameter = nn.Parameter(x.clone())
        parameter.grad = torch.ones_like(x)
        optimizer = kind([{"params": [parameter]}], lr=LR, betas=(0.9, 0.95), eps=1e-8)
        return {"ms": took_ms(optimizer.step)}

    parts: dict[str, Callable[[], dict[str, float]]] = {"copy": lambda: {"ms": took_ms(x.clone)}}
    parts |= {name: partial(stepped, kind) for name, kind in STEPS.items()}
    parts |= {name: partial(coded, config) for name, config in CODECS.items()}
    parts["top k, selection"] = selected
    for name, timed in parts.items():
        if time.monotonic() > end_s and name != "copy":
            yield {"kernel": name, "refused": OVER}
            continue
        try:
            yield {"kernel": name} | timed()
        except Exception as error:  # of one kernel's compiler, as in `measure`
            yield {"kernel": name, "refused": _said(error)}


def _milliseconds(setting: Setting, turns: int, work: Callable[[], Any]) -> float:
    """The median, after a call that may compile."""
    work()
    return round(1e3 * statistics.median(_seconds(setting, work) for _ in range(turns)), 4)


if __name__ == "__main__":
    run(gpu)
