"""`python -m benchmarks.host_overhead`: what Shoal adds to a step whose kernels take next to no time.

The model is a GPT of narrow blocks, so that nearly all of a step is Python and the dispatch of operators: what keeps a
GPU waiting shows here without one. One process of one thread holds all sides, and takes blocks of their steps in turn:

    plain         a loop as a careful person writes it: fused AdamW, clipping, gradients set to None; twice (A/A)
    shoal_train   the step of `shoal train`, with its feed, its measurements and its events
    own_loop      the loop of `shoal.start`

With `--microbatches` several of one sample make a step, in which loops of a script's own do what many do beside their
updates, too: a scheduler, a moving average of the weights, and a mean of the losses.

A side costs its time over that of the plain loop, turn by turn: the processor's seconds, which whoever else is on the
machine disturbs less than those of a clock, and those of the clock beside them. Both hold the threads that read ahead.
The 95 % bound is the upper one of the median.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import TensorDataset

from benchmarks.command import run
from benchmarks.loop_scripts import by_itself
from benchmarks.own_gpt import build
from shoal.assembly.objects import UserObjects
from shoal.assembly.run import open_run
from shoal.bench.groups import interleaved, join_group, join_store, repeat
from shoal.bench.options import AsJson, names, numbers
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import (
    Result,
    Turns,
    again_cells,
    check,
    columns,
    lower_bound,
    merged,
    milliseconds,
    print_report,
    ratios,
)
from shoal.bench.training_job import ENDLESS, LR, Training, training_job
from shoal.config.named import GIVEN
from shoal.data.inputs import AsInputs
from shoal.engine.loop import take_step
from shoal.launcher.environment import Place
from shoal.own_loop.loop import Training as OwnLoop
from shoal.runfile.run_file import RunFile

PLAIN, AGAIN, TRAIN, OWN = "plain", "plain_again", "shoal_train", "own_loop"
WITHIN = {TRAIN: 1.02, OWN: 1.03}
"""Promised of the 95 % bound of each side's cost."""
VOCABULARY, TOKENS, WIDTH, HEADS, SAMPLES = 64, 16, 32, 4, 4096
CLIP_NORM = 1.0
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """How deep the model is, its precision, the microbatches of a step, and what the sides share."""

    blocks: int
    precision: str
    microbatches: int
    data: Tensor
    folder: Path
    stack: ExitStack

    def model(self) -> nn.Module:
        """The same weights on every side."""
        torch.manual_seed(0)
        return build(vocabulary=VOCABULARY, sequence=TOKENS, width=WIDTH, heads=HEADS, layers=self.blocks)

    def run_file(self, name: str) -> RunFile:
        """The run of a side, whose folder is made here. The step clips, as the other sides do."""
        (folder := self.folder / name).mkdir()
        given = {"kind": "python", "build": GIVEN}
        own = {"name": "bench", "steps": ENDLESS, "directory": str(folder), "device": "cpu", "processes": 1}
        batch = {"global_samples": self.microbatches, "micro_samples": 1}
        tables: dict[str, Any] = {"run": own, "model": given, "data": given, "batch": batch}
        tables |= {"precision": {"kind": self.precision}, "checkpoint": {"every_steps": 0}}
        tables |= {"optimizer": {"kind": "adamw", "lr": LR, "clip_norm": CLIP_NORM}}
        return msgspec.convert(tables, RunFile)


def host_overhead(
    blocks: Annotated[str, typer.Option(help="Blocks of the model, several with commas.")] = "12,48",
    precisions: Annotated[str, typer.Option(help="Of float32, bfloat16. Default: both.")] = "",
    pairs: Annotated[int, typer.Option(help="Turns of all sides.", min=6)] = 60,
    block: Annotated[int, typer.Option(help="Steps in a row of one side.", min=1)] = 10,
    microbatches: Annotated[int, typer.Option(help="Of a step.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """What a step of `shoal train` and of an own loop costs beside a plain PyTorch loop, bound by the host.

    Example: python -m benchmarks.host_overhead --blocks 12 --precisions bfloat16
    """
    depths, kinds = numbers(blocks, "--blocks"), names(precisions, "--precisions", PRECISIONS)
    if is_rank():
        run_as_rank(lambda place: measure(place, depths[0], kinds[0], microbatches, pairs=pairs, block=block))
        return
    command = ["benchmarks.host_overhead", "--pairs", str(pairs), "--block", str(block)]
    command += ["--microbatches", str(microbatches)]
    results = [
        on_ranks([*command, "--blocks", str(depth), "--precisions", kind], processes=1)
        for depth in depths
        for kind in kinds
    ]
    print_report("host_overhead", merged(results), as_json=as_json)


def measure(place: Place, blocks: int, precision: str, microbatches: int, *, pairs: int, block: int) -> Result:
    """A row and a check for each side of Shoal's."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        clock = join_group("clock", place, join_store(place))
        data = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(0))
        setting = Setting(blocks, precision, microbatches, data, folder, stack)
        made = {PLAIN: plain(setting), AGAIN: plain(setting), TRAIN: trained(setting, place), OWN: own(setting, place)}
        spent = {name: Spent(partial(repeat, step, block)) for name, step in made.items()}
        turns = interleaved(spent, clock, pairs=pairs, always=sorted(spent))
    used = [{name: side.seconds[turn - pairs] for name, side in spent.items()} for turn in range(pairs)]
    return _result(_each(turns, block), _each(used, block), setting)


class Spent:
    """Calls `work`, and keeps the processor's seconds of each call."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.seconds: list[float] = []

    def __call__(self) -> None:
        begin_s = time.process_time()
        self._work()
        self.seconds.append(time.process_time() - begin_s)


def _each(turns: Turns, steps: int) -> Turns:
    """Seconds of one of the `steps` of a turn."""
    return [{side: seconds / steps for side, seconds in turn.items()} for turn in turns]


def plain(setting: Setting) -> Callable[[], Any]:
    """One process, without Shoal."""
    model, data, numbers = setting.model(), setting.data, iter(range(ENDLESS))
    optimizer, parameters = adamw(model), list(model.parameters())
    compute, several = PRECISIONS[setting.precision], setting.microbatches
    beside = Beside(model, optimizer) if several > 1 else None

    def step() -> float:
        total = 0.0
        for _ in range(several):
            number = next(numbers) % SAMPLES
            batch = data[number : number + 1]
            with torch.autocast("cpu", dtype=compute, enabled=compute is not None):
                loss = loss_of(model, batch)
            (loss if several == 1 else loss / several).backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if beside is not None:
            beside(total / several)
        return total / several

    return step


def trained(setting: Setting, place: Place) -> Callable[[], Any]:
    """The body of the loop of `shoal train`."""
    run_file, whole = setting.run_file(TRAIN), setting.data
    data = TensorDataset(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())
    opened = open_run(run_file, place, UserObjects(model=setting.model(), data=data), store=HashStore())
    setting.stack.callback(opened.generation.gradients.close)
    training = Training(opened, setting.stack.enter_context(opened.feed()))
    return partial(take_step, training_job(training, setting.folder / TRAIN, setting.stack))


def own(setting: Setting, place: Place) -> Callable[[], Any]:
    """The loop of `shoal.start`."""
    model = setting.model()
    optimizer, run_file = adamw(model), setting.run_file(OWN)
    objects = UserObjects(model=model, data=(AsInputs(TensorDataset(setting.data)), None), optimizers=[optimizer])
    opened = open_run(run_file, place, objects, store=HashStore())
    setting.stack.callback(opened.generation.gradients.close)
    training = Training(opened, setting.stack.enter_context(opened.feed()))
    job = training_job(training, setting.folder / OWN, setting.stack)
    loop = OwnLoop(opened, replace(job, rate=lambda number: None), ExitStack())
    step, several = own_step(loop, model, optimizer), setting.microbatches
    beside = Beside(model, optimizer) if several > 1 else None

    def of_several() -> float:
        total = sum(float(step()) for _ in range(several))
        if beside is not None and loop.update:
            beside(total / several)
        return total / several

    return by_itself(of_several, opened, setting.stack)


class Beside:
    """What a loop does beside its updates."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self._weights: list[Tensor] = list(model.parameters())
        self._averages = [weight.detach().clone() for weight in self._weights]
        self._loss = 0.0

    @torch.no_grad()
    def __call__(self, loss: float) -> None:
        """After an update, of this loss."""
        self._scheduler.step()
        torch._foreach_lerp_(self._averages, self._weights, 0.01)  # pyright: ignore[reportPrivateImportUsage]
        self._loss += 0.1 * (loss - self._loss)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of a script."""
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def own_step(loop: OwnLoop, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    """A microbatch of a loop, which is its step where it is the only one; its loss."""
    batches = loop.batches()

    def step() -> Tensor:
        (batch,) = next(batches)
        with loop.autocast():
            loss = loss_of(model, batch)
        loop.backward(loss)
        loop.clip_grad_norm_(CLIP_NORM)
        optimizer.step()
        return loss.detach()

    return step


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross-entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _result(turns: Turns, used: Turns, setting: Setting) -> Result:
    times, again = columns(used), again_cells(ratios(used, AGAIN, peer=PLAIN))
    rows, checks = [], []
    for side in (TRAIN, OWN):
        gained = ratios(used, side, peer=PLAIN)
        upper = 1 / lower_bound(gained)
        rows.append(
            {
                "side": side,
                "blocks": setting.blocks,
                "precision": setting.precision,
                "microbatches": setting.microbatches,
                "pairs": len(gained),
                **milliseconds({PLAIN: times[PLAIN], "side": times[side]}),
                "cost_median": round(1 / statistics.median(gained), 4),
                "cost_upper_95": round(upper, 4),
                "cost_by_the_clock": round(1 / statistics.median(ratios(turns, side, peer=PLAIN)), 4),
                **again,
            }
        )
        what = f"{side} beside a plain loop, {setting.blocks} blocks, {setting.precision}, 95 % bound"
        checks.append(check(what, upper, WITHIN[side], at_most=True))
    return {"rows": rows, "checks": checks}


if __name__ == "__main__":
    run(host_overhead)
