"""`shoal bench step`: a training step of Shoal beside the same step in a hand-written DDP script.

Every rank, of one thread, holds all sides: Shoal's, the DDP script twice, and the plain model without communication.
Steps are taken in turn, in an order that changes from pair to pair, each after a barrier. The ratio of DDP to itself
(A/A) shows what noise alone does.

Shoal has two sides. `shoal` sums gradients and updates all parameters on every rank, as DDP does. `shoal_zero_1` is the
same run file with `layout.shard` at the number of ranks and `memory.zero = 1`: each rank updates its part of the
parameters and keeps only that part of the optimizer's state.

`--model` puts a module of the user's in the place of Shoal's GPT, on all sides. Each side's minor page faults are
counted: an allocator that gives memory back to the kernel after each step pays for it with tens of thousands a second.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.bench.options import FEWEST_PAIRS, AsJson, Processes, token_counts
from shoal.bench.ranks import is_rank, on_ranks, rank_folder, run_as_rank
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
from shoal.observe.events import read_events

if TYPE_CHECKING:
    from shoal.comm.collective import Collective
    from shoal.launcher.environment import Place
    from shoal.runfile.run_file import RunFile

BOUNDS = {(256, 2): 1.05, (256, 4): 1.15, (2048, 2): 1.0, (2048, 4): 1.0}
"""Promised of the 95 % bound of the ratio to DDP, by tokens of a rank and ranks."""
OWN_BOUNDS = {(256, 2): 1.08, (256, 4): 1.08, (2048, 2): 1.0, (2048, 4): 1.0}
"""The same for a module of the user's."""
OTHER_BOUND = 1.0
SHOAL = ("shoal", "shoal_zero_1")
DDP_AGAIN = "ddp_twin"
"""The second measurement of DDP (A/A), as the rows name it."""
SCALING_TOKENS = 2048
LOOP_COST, SCALING = 0.02, 1.7
PARTS = ("time/data", "time/forward_backward", "time/sync_exposed", "time/optimizer", "time/checkpoint_stall")


def step(
    tokens: Annotated[
        str, typer.Option(help="Tokens of a rank and step, several with commas; multiples of 128.")
    ] = "256,2048",
    model: Annotated[
        str,
        typer.Option(
            help="Your own module in place of Shoal's GPT: package.module:function, which returns an nn.Module. It "
            "gets int64 tokens [samples, 128], all below 128, and returns logits [samples, 128, 128 or more]."
        ),
    ] = "",
    pairs: Annotated[
        int | None, typer.Option(help="Paired steps for each; default: 100, more where steps are short.", min=6)
    ] = None,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """A training step beside the same step in a hand-written DDP script.

    Example: shoal bench step --tokens 256 --pairs 20
    """
    sizes = token_counts(tokens)
    if is_rank():
        run_as_rank(lambda place: measure(place, tokens=sizes[0], pairs=pairs or FEWEST_PAIRS, model=model))
        return
    if model:
        _check_function(model)
    results = []
    for size in sizes:
        count = pairs or max(FEWEST_PAIRS, min(4 * FEWEST_PAIRS, FEWEST_PAIRS * 1024 // size))
        command = ["shoal", "bench", "step", "--tokens", str(size), "--pairs", str(count), "--model", model]
        results.append(on_ranks(command, processes=processes, part=f"steps of {size:,} tokens on {processes} ranks"))
    print_report("step", merged(results), as_json=as_json)


def measure(place: Place, *, tokens: int, pairs: int, model: str = "") -> Result | None:
    """One row and its checks, for `tokens` of a rank and step; None on all ranks but rank 0.

    `model` names the function that builds a user's module. Raises `UserCodeError` where it cannot be called.
    """
    import torch
    from torch._C._distributed_c10d import PrefixStore

    from shoal.assembly.objects import UserObjects, model_of
    from shoal.bench.ddp_script import Script
    from shoal.bench.groups import interleaved, join_default_group, join_group, join_store
    from shoal.bench.report import tell
    from shoal.bench.training_job import MODEL, SEQUENCE, corpus_file, gpt_run_file, start_training, training_job
    from shoal.engine.loop import take_step
    from shoal.models.config import PythonModel

    chosen = PythonModel(build=model) if model else MODEL

    with ExitStack() as stack:
        folder = stack.enter_context(rank_folder())
        corpus, store = corpus_file(folder), join_store(place)
        join_default_group(place, store, stack)
        sides: dict[str, CountedStep] = {}
        plain = gpt_run_file(folder, corpus, tokens * place.world_size, model=chosen)
        for name, run_file in zip(SHOAL, (plain, _with_zero_1(plain, place.world_size)), strict=True):
            (folder / name).mkdir()
            training = start_training(run_file, place, stack, store=PrefixStore(name, store))
            job = training_job(training, folder / name, stack)
            sides[name] = CountedStep(lambda job=job: take_step(job))
        samples = tokens // SEQUENCE
        for name, distributed in (("ddp", True), (DDP_AGAIN, True), ("no_communication", False)):
            module = model_of(plain, UserObjects(), device=torch.device("cpu"), dtype=torch.float32)
            script = Script(
                module, corpus, samples=samples, sequence=SEQUENCE, rank=place.rank, distributed=distributed
            )
            sides[name] = CountedStep(script.step)
        clock = join_group("clock", place, store)
        turns = interleaved(sides, clock, pairs=pairs, always=("ddp", *SHOAL), tell=tell)
        faults = {name: sides[name].faults_per_s() for name in ("ddp", *SHOAL)}
        alone_s = _alone(sides["no_communication"], clock, steps=max(5, pairs // 5))
        if place.rank != 0:
            return None
        loop_cost = _loop_cost(folder / "shoal")
        return _result(turns, alone_s, loop_cost, faults, tokens=tokens, world_size=place.world_size, model=model)


class CountedStep:
    """A side's step, which counts the minor page faults of this process in its steps after the first few."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self._counts: list[tuple[int, float]] = []

    def __call__(self) -> None:
        before, begin_s = _minor_faults(), time.perf_counter()
        self._step()
        self._counts.append((_minor_faults() - before, time.perf_counter() - begin_s))

    @property
    def faults(self) -> int:
        """Minor page faults in the steps that count."""
        return sum(faults for faults, _ in self._counted())

    def faults_per_s(self) -> int:
        """For each second in those steps."""
        return round(self.faults / sum(seconds for _, seconds in self._counted()))

    def _counted(self) -> list[tuple[int, float]]:
        from shoal.bench.groups import WARM_UP_STEPS

        return self._counts[WARM_UP_STEPS:]


def _minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _check_function(name: str) -> None:
    """Raises `typer.BadParameter` for what can be no function, and where there is no such module."""
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise typer.BadParameter(f"'{name}'; give package.module:function", param_hint="--model")
    outermost = module.partition(".")[0]
    found = PathFinder.find_spec(outermost, [os.getcwd(), *sys.path])  # where the ranks look, too
    if found is None:
        raise typer.BadParameter(
            f"there is no module {outermost}: start where its file or package lies, or set PYTHONPATH",
            param_hint="--model",
        )


def _with_zero_1(run_file: RunFile, ranks: int) -> RunFile:
    import msgspec

    return msgspec.structs.replace(
        run_file,
        layout=msgspec.structs.replace(run_file.layout, shard=ranks),
        memory=msgspec.structs.replace(run_file.memory, zero=1),
    )


def _alone(step: Callable[[], Any], clock: Collective, *, steps: int) -> list[float]:
    """Seconds of steps of rank 0 while the others wait: what one process of one thread does by itself."""
    times = []
    clock.barrier().wait()
    if clock.rank == 0:
        for _ in range(steps):
            begin_s = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin_s)
    clock.barrier().wait()
    return times


def _result(
    turns: Turns,
    alone_s: list[float],
    loop_cost: float,
    faults: Mapping[str, int],
    *,
    tokens: int,
    world_size: int,
    model: str,
) -> Result:
    gained = {name: ratios(turns, name, peer="ddp") for name in SHOAL}
    times = columns(turns)
    scaling = world_size * statistics.median(alone_s) / statistics.median(times["shoal"])
    row = {
        "model": model or "shoal's GPT",
        "tokens_per_rank": tokens,
        "ranks": world_size,
        "pairs": len(turns),
        **milliseconds({**times, "one_process_alone": alone_s}),
        "ratio_median": round(statistics.median(gained["shoal"]), 4),
        "ratio_lower_95": round(lower_bound(gained["shoal"]), 4),
        "zero_1_ratio_median": round(statistics.median(gained["shoal_zero_1"]), 4),
        "zero_1_ratio_lower_95": round(lower_bound(gained["shoal_zero_1"]), 4),
        **again_cells(ratios(turns, DDP_AGAIN, peer="ddp")),
        **{f"{name}_page_faults_per_s": count for name, count in faults.items()},
        "loop_cost": round(loop_cost, 5),
        "scaling": round(scaling, 3),
    }
    what = f"tokens/s against DDP, 95 % bound, {tokens} tokens a rank, {world_size} ranks"
    bound = (OWN_BOUNDS if model else BOUNDS).get((tokens, world_size), OTHER_BOUND)
    checks = [
        *(check(f"{name}: {what}", lower_bound(found), bound) for name, found in gained.items()),
        check(f"loop above the sum of its parts, {tokens} tokens a rank", loop_cost, LOOP_COST, at_most=True),
    ]
    if tokens >= SCALING_TOKENS:
        checks.append(check(f"{world_size} processes against one, {tokens} tokens a rank", scaling, SCALING))
    return {"rows": [row], "checks": checks}


def _loop_cost(folder: Path) -> float:
    """By how much the loop's steps exceed the sum of their parts, in the median; the first steps are left out."""
    from shoal.bench.groups import WARM_UP_STEPS

    costs = []
    for event in read_events(folder)[WARM_UP_STEPS:]:
        whole_s, parts_s = event.get("time/step") or 0.0, sum(event.get(name) or 0.0 for name in PARTS)
        costs.append(whole_s / parts_s - 1)
    return statistics.median(costs)
