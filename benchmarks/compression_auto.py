"""`python -m benchmarks.compression_auto`: training over a link that becomes slow in mid-run, and fast again.

Two hosts of one rank each train a GPT, 256 tokens a rank and step: `--model thin` has 1.2 million parameters in 24
layers, so that a codec's work for each matrix counts beside its bytes; `wide` five million in 6. The link has 1 Gbit/s,
then 50 Mbit/s, then 1 Gbit/s again. Every fixed choice and `codec.kind = "auto"`, which has to notice, take a few steps
of a phase in turn, as many as one another: `--steps` each, or what a third of `--seconds` allows.

`--links`: the size of buckets and the algorithm of sums in place of codecs; with `--ranks-per-host 2` all sums go over
Gloo, so that hierarchies of hosts are among the algorithms.

`--periods`: local steps with fixed periods and with such that follow the link (`sync.wait_share`), and the loss as well
(`sync.adapt_every`), for as many seconds at each rate, one side after the other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from benchmarks.compression import TOKENS
from shoal.bench.groups import join_group, join_store, slowest_rank
from shoal.bench.options import AsJson, names
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Check, Result, check, print_report
from shoal.bench.training_job import MODEL, Training, gpt_run_file, start_training
from shoal.codec.config import AutoConfig, BlockwiseConfig, CastConfig, CodecConfig, NoCodec, PowerSGDConfig
from shoal.comm.collective import Collective
from shoal.comm.config import WireConfig
from shoal.data.config import StdlibText
from shoal.errors import EnvironmentFault
from shoal.gradients.config import GradientsConfig
from shoal.launcher.environment import Place
from shoal.launcher.lab.lab_file import lab_from
from shoal.launcher.lab.network import INTERFACE, tc, why_not
from shoal.models.config import GPTConfig, ModelConfig
from shoal.sync.config import LocalConfig

FAST_MBIT, SLOW_MBIT, BURST_BYTES = 1000, 50, 32 << 10
PHASES = 3
AUTO, WARM_UP_STEPS, BLOCK, LAST, LOST = "auto", 12, 10, 20, 1.1
SECONDS = 200.0
MODELS = {"thin": GPTConfig(layers=24, width=64, heads=4, feed_forward="gelu", feed_forward_width=256), "wide": MODEL}
SIDES: Mapping[str, CodecConfig] = {
    "none": NoCodec(),
    "bfloat16": CastConfig(),
    "int8": BlockwiseConfig(),
    "power_sgd": PowerSGDConfig(),
    AUTO: AutoConfig(),
}


MIB = 1 << 20
FOLLOWS = {"gradients": GradientsConfig(bucket="auto"), "wire": WireConfig(algorithm="auto", transport="gloo")}
LINK_SIDES: Mapping[str, Mapping[str, Any]] = {
    **{
        f"{algorithm} {size}": {
            "gradients": GradientsConfig(bucket_bytes=size * MIB),
            "wire": WireConfig(algorithm=algorithm, transport="gloo"),
        }
        for algorithm in ("backend", "ring", "halving-doubling", "recursive-doubling", "two-shot", "hierarchical")
        for size in (1, 4, 25)
    },
    AUTO: FOLLOWS,
}
"""By algorithm and MiB of a bucket. `backend` is Gloo's own ring."""

WAIT_SHARE, LONGEST = 0.2, 32
AVERAGING = LocalConfig(outer_lr=1.0, outer_momentum=0.0)
PERIODS: Mapping[str, LocalConfig] = {
    **{f"period {h}": msgspec.structs.replace(AVERAGING, period=h) for h in (1, 8, 32)},
    "follows": msgspec.structs.replace(AVERAGING, period=1, longest_period=LONGEST, wait_share=WAIT_SHARE),
    "follows link and loss": msgspec.structs.replace(
        AVERAGING, period=1, longest_period=LONGEST, wait_share=WAIT_SHARE, adapt_every=LONGEST
    ),
}


def compression_auto(
    steps: Annotated[int, typer.Option(help="Steps of each phase, at most.", min=10)] = 160,
    seconds: Annotated[float, typer.Option(help="Of all phases, which end after fewer steps where needed.")] = SECONDS,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "thin",
    sides: Annotated[
        str, typer.Option(help=f"Of {', '.join(SIDES)}; with --links ring 4 and others, or auto.")
    ] = "int8,power_sgd,auto",
    links: Annotated[bool, typer.Option(help="Algorithms and sizes of buckets in place of codecs.")] = False,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks on each of two hosts.", min=1)] = 1,
    fast_mbit: Annotated[int, typer.Option(help="Rate of the first and last phase.")] = FAST_MBIT,
    slow_mbit: Annotated[int, typer.Option(help="Rate of the second phase.")] = SLOW_MBIT,
    periods: Annotated[float, typer.Option(help="Seconds of each phase of local steps, in place of codecs.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Training over a link that becomes slow and fast again: `auto` beside every fixed choice.

    It needs root and iproute2, as hosts are network namespaces.

    Takes `--seconds` and half a minute.

    Example: python -m benchmarks.compression_auto --steps 40 --sides none,bfloat16,int8,auto
    """
    tables = LINK_SIDES if links else {name: {"codec": codec} for name, codec in SIDES.items()}
    chosen = {name: tables[name] for name in names(sides, "--sides", tables)}
    names(model, "--model", MODELS)
    rates = (fast_mbit, slow_mbit, fast_mbit)
    if is_rank():
        measured = partial(measure, chosen=chosen, model=MODELS[model], steps=steps, seconds=seconds, rates=rates)
        if periods:
            measured = partial(measure_periods, model=MODELS[model], phase_s=periods, rates=rates)
        run_as_rank(measured)
        return
    if reason := why_not():
        raise EnvironmentFault(f"{reason}; this benchmark has no other network")
    command = ["benchmarks.compression_auto", "--steps", str(steps), "--seconds", str(seconds)]
    command += ["--periods", str(periods)]
    command += ["--model", model, "--sides", sides, "--links" if links else "--no-links"]
    command += ["--fast-mbit", str(fast_mbit), "--slow-mbit", str(slow_mbit)]
    lab = lab_from({"lab": {"hosts": 2, "ranks_per_host": ranks_per_host, "rate_mbit": fast_mbit}}, file="lab")
    print_report("compression_auto", on_ranks(command, processes=2 * ranks_per_host, lab=lab), as_json=as_json)


def measure(
    place: Place, *, chosen: Mapping[str, Mapping[str, Any]], model: ModelConfig, steps: int, seconds: float,
    rates: Sequence[int],
) -> Result | None:  # fmt: skip
    """A row for each side; None on all ranks but rank 0. Sides take `BLOCK` steps in turn."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store = join_store(place)
        clock = join_group("clock", place, store, transport="gloo")
        sides = [
            Side(name, _started(place, stack, folder, PrefixStore(name, store), model, **tables))
            for name, tables in chosen.items()
        ]
        for side in sides:
            side.take(WARM_UP_STEPS, clock)
        for mbit in rates:
            set_rate(mbit, clock)
            for side in sides:
                side.begin_phase()
            for begin in range(0, steps, BLOCK):
                for side in sides:
                    side.phases_s[-1] += side.take(min(BLOCK, steps - begin), clock)
                if sum(side.phases_s[-1] for side in sides) > seconds / PHASES:
                    break
        set_rate(rates[0], clock)
        rows = [side.row() for side in sides]
    return {"rows": rows, "checks": held_against(rows)} if place.rank == 0 else None


def _started(place: Place, stack: ExitStack, folder: Path, store: Store, model: ModelConfig, **tables: Any) -> Training:
    """A run on the source of Python's standard library, with other `tables`."""
    run_file = gpt_run_file(folder, folder, TOKENS * place.world_size, model=model)
    run_file = msgspec.structs.replace(run_file, data=StdlibText(), **tables)
    return start_training(run_file, place, stack, store=store)


@dataclass
class Side:
    """One training, what its phases took, and its last losses. `said`: when a choice has changed, and why."""

    name: str
    training: Training
    phases_s: list[float] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    losses: deque[float] = field(default_factory=partial(deque, maxlen=LAST))
    taken: int = 0

    def begin_phase(self) -> None:
        """The link has another rate from now on."""
        self.phases_s.append(0.0)
        self.begins.append(self.taken)

    def take(self, steps: int, clock: Collective) -> float:
        """Seconds of the slowest rank."""
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.losses.append(self.training.take_step().loss)
            self.taken += 1
            chooses = (self.training.run.generation.coded, self.training.run.step.links)
            lines = [line for each in chooses if each is not None for line in each.take_lines()]
            self.said += [f"step {self.taken}: {line}" for line in lines]
        return slowest_rank(time.perf_counter() - begin_s, clock)

    def row(self) -> dict[str, Any]:
        phases_s = [round(seconds, 2) for seconds in self.phases_s]
        steps = [end - begin for begin, end in pairwise([*self.begins, self.taken])]
        return {
            "side": self.name, "steps": steps, "phases_s": phases_s, "run_s": round(sum(phases_s), 2),
            "loss": round(sum(self.losses) / len(self.losses), 3), "said": self.said,
        }  # fmt: skip


def held_against(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """`auto` beside the best fixed choice of each phase, and of the whole run."""
    fixed = [row for row in rows if row["side"] != AUTO]
    auto = next((row for row in rows if row["side"] == AUTO), None)
    if auto is None or not fixed:
        return []
    best = [min(row["phases_s"][phase] for row in fixed) for phase in range(PHASES)]
    whole_s = min(row["run_s"] for row in fixed)
    return [
        *(
            check(f"auto over the best of phase {phase + 1}", auto["phases_s"][phase] / best_s, LOST, at_most=True)
            for phase, best_s in enumerate(best)
        ),
        check("auto over the best of each phase", auto["run_s"] / sum(best), LOST, at_most=True),
        check("the best fixed choice over auto, the whole run", whole_s / auto["run_s"], 1.0),
    ]


def measure_periods(place: Place, *, model: ModelConfig, phase_s: float, rates: Sequence[int]) -> Result | None:
    """A row for each period; None on all ranks but rank 0."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store = join_store(place)
        clock = join_group("clock", place, store, transport="gloo")
        rows = []
        for name, sync in PERIODS.items():
            with ExitStack() as own:
                training = _started(place, own, folder, PrefixStore(name, store), model, sync=sync)
                rows.append({"side": name, **_periods_taken(training, clock, phase_s=phase_s, rates=rates)})
    return {"rows": rows, "checks": []} if place.rank == 0 else None


def _periods_taken(training: Training, clock: Collective, *, phase_s: float, rates: Sequence[int]) -> dict[str, Any]:
    """Steps and last losses by phase. A phase ends with an agreement."""
    steps: list[int] = []
    losses: list[float] = []
    agreement = training.run.generation.agreement
    for mbit in rates:
        set_rate(mbit, clock)
        begin_s, said, over = time.perf_counter(), [], False
        while not over:
            said.append(training.take_step().loss)
            over = agreement.equal and slowest_rank(time.perf_counter() - begin_s, clock) > phase_s
        steps.append(len(said))
        losses.append(round(statistics.fmean(said[-LAST:]), 3))
    set_rate(rates[0], clock)
    return {"steps": steps, "losses": losses}


def set_rate(mbit: int, clock: Collective) -> None:
    """From now on each rank's host sends at this rate. All ranks call it."""
    clock.barrier().wait()
    tc([f"qdisc replace dev {INTERFACE} root tbf rate {mbit}mbit burst {BURST_BYTES} latency 100ms"])
    clock.barrier().wait()


if __name__ == "__main__":
    run(compression_auto)
