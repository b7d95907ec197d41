"""`python -m benchmarks.compression_auto`: training over a link that becomes slow in mid-run, and fast again.

Two hosts of one rank each train a GPT of five million parameters, 256 tokens a rank and step. The link has 10 Gbit/s,
then 50 Mbit/s, then 10 Gbit/s again, for as many steps each. Every fixed choice and `codec.kind = "auto"` take all
steps of a phase one after the other. The link changes between two measurements of `auto`, which has to notice.

`--periods`: local steps with fixed periods and with one that follows the link (`sync.wait_share`), at 1 Gbit/s,
50 Mbit/s and 1 Gbit/s, for as many seconds each.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from benchmarks.compression import TOKENS, two_hosts
from shoal.bench.groups import join_group, join_store, slowest_rank
from shoal.bench.options import AsJson
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, check, print_report
from shoal.bench.training_job import Training, corpus_file, gpt_run_file, start_training
from shoal.codec.config import AutoConfig, BlockwiseConfig, CastConfig, CodecConfig, NoCodec, PowerSGDConfig
from shoal.comm.collective import Collective
from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Place
from shoal.launcher.lab.network import INTERFACE, tc, why_not
from shoal.sync.config import LocalConfig

FAST_MBIT, SLOW_MBIT, BURST_BYTES = 10_000, 50, 32 << 10
PHASES_MBIT = (FAST_MBIT, SLOW_MBIT, FAST_MBIT)
AUTO, WARM_UP_STEPS, WITHIN_STEPS = "auto", 2, 20
SIDES: Mapping[str, CodecConfig] = {
    "none": NoCodec(),
    "bfloat16": CastConfig(),
    "int8": BlockwiseConfig(),
    "power_sgd": PowerSGDConfig(),
    AUTO: AutoConfig(),
}


WAIT_SHARE, LONGEST = 0.2, 32
PERIODS_MBIT = (1000, 50, 1000)
AVERAGING = LocalConfig(outer_lr=1.0, outer_momentum=0.0)
PERIODS: Mapping[str, LocalConfig] = {
    **{f"period {h}": msgspec.structs.replace(AVERAGING, period=h) for h in (1, 8, 32)},
    "follows": msgspec.structs.replace(AVERAGING, period=1, longest_period=LONGEST, wait_share=WAIT_SHARE),
}


def compression_auto(
    steps: Annotated[int, typer.Option(help="Steps of each phase.", min=10)] = 22,
    periods: Annotated[float, typer.Option(help="Seconds of each phase of local steps, in place of codecs.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Training over a link that becomes slow and fast again: `auto` beside every fixed choice.

    It needs root and iproute2, as hosts are network namespaces.

    Example: python -m benchmarks.compression_auto --steps 12
    """
    if is_rank():
        run_as_rank(lambda place: measure_periods(place, periods) if periods else measure(place, steps=steps))
        return
    if reason := why_not():
        raise EnvironmentFault(f"{reason}; this benchmark has no other network")
    command = ["benchmarks.compression_auto", "--steps", str(steps), "--periods", str(periods)]
    print_report("compression_auto", on_ranks(command, processes=2, lab=two_hosts(FAST_MBIT)), as_json=as_json)


def measure(place: Place, *, steps: int) -> Result | None:
    """A row for each side; None on all ranks but rank 0."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store = join_store(place)
        clock = join_group("clock", place, store, transport="gloo")
        rows = [_row(name, place, store, folder, clock, steps=steps) for name in SIDES]
    if place.rank != 0:
        return None
    (auto,) = (row for row in rows if row["side"] == AUTO)
    fixed = min(row["run_s"] for row in rows if row["side"] != AUTO)
    late = max(steps_until_change(auto["changed_at"], phase * steps, steps) for phase in range(1, len(PHASES_MBIT)))
    checks = [
        check("the best fixed choice over auto, the whole run", fixed / auto["run_s"], 1.0),
        check("steps until auto has followed the link", late, WITHIN_STEPS, at_most=True),
    ]
    return {"rows": rows, "checks": checks}


def measure_periods(place: Place, phase_s: float) -> Result | None:
    """A row for each period; None on all ranks but rank 0."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store = join_store(place)
        clock = join_group("clock", place, store, transport="gloo")
        rows = [_period_row(name, place, store, folder, clock, phase_s=phase_s) for name in PERIODS]
    return {"rows": rows, "checks": []} if place.rank == 0 else None


def _period_row(
    name: str, place: Place, store: Store, folder: Path, clock: Collective, *, phase_s: float
) -> dict[str, Any]:
    """Steps, and the share of the time that was spent on agreements, by phase. Ranks end a phase after an agreement."""
    steps: list[int] = []
    shares: list[float] = []
    with ExitStack() as stack:
        set_rate(PERIODS_MBIT[0], clock)
        run_file = msgspec.structs.replace(
            gpt_run_file(folder, corpus_file(folder), TOKENS * place.world_size), sync=PERIODS[name]
        )
        training = start_training(run_file, place, stack, store=PrefixStore(name, store))
        agreement = training.run.generation.agreement
        for mbit in PERIODS_MBIT:
            set_rate(mbit, clock)
            training.run.mesh.ledger.take()
            begin_s, count, over = time.perf_counter(), 0, False
            while not over:
                training.take_step()
                count += 1
                over = agreement.equal and slowest_rank(time.perf_counter() - begin_s, clock) > phase_s
            waited_s = sum(entry.exposed_s for entry in training.run.mesh.ledger.take().values())
            steps.append(count)
            shares.append(round(waited_s / (time.perf_counter() - begin_s), 2))
        set_rate(PERIODS_MBIT[0], clock)
    return {"side": name, "steps": steps, "waits": shares}


def steps_until_change(changed_at: Sequence[int], start: int, steps: int) -> int:
    """Steps from the start of a phase to the last change in it; the whole phase where there was none."""
    return max((step - start for step in changed_at if start <= step < start + steps), default=steps)


def _row(name: str, place: Place, store: Store, folder: Path, clock: Collective, *, steps: int) -> dict[str, Any]:
    """All phases of one side, from a model that has taken a few steps."""
    phase_s: list[float] = []
    changed_at: list[int] = []
    lines: list[str] = []
    with ExitStack() as stack:
        set_rate(FAST_MBIT, clock)
        run_file = msgspec.structs.replace(
            gpt_run_file(folder, corpus_file(folder), TOKENS * place.world_size), codec=SIDES[name]
        )
        training = start_training(run_file, place, stack, store=PrefixStore(name, store))
        for _ in range(WARM_UP_STEPS):
            _step(training)
        for number, mbit in enumerate(PHASES_MBIT):
            set_rate(mbit, clock)
            begin_s = time.perf_counter()
            for step in range(steps):
                if said := _step(training):
                    changed_at.append(number * steps + step)
                    lines += said
            phase_s.append(slowest_rank(time.perf_counter() - begin_s, clock))
        set_rate(FAST_MBIT, clock)
    return {
        "side": name,
        "steps": steps * len(PHASES_MBIT),
        "phases_s": [round(seconds, 2) for seconds in phase_s],
        "run_s": round(sum(phase_s), 2),
        "changed_at": changed_at,
        "said": lines,
    }


def _step(training: Training) -> list[str]:
    """The lines in which a choice says that it has changed."""
    training.take_step()
    coded = training.run.generation.coded
    return [] if coded is None else coded.take_lines()


def set_rate(mbit: int, clock: Collective) -> None:
    """From now on each rank's host sends at this rate. All ranks call it."""
    clock.barrier().wait()
    tc([f"qdisc replace dev {INTERFACE} root tbf rate {mbit}mbit burst {BURST_BYTES} latency 100ms"])
    clock.barrier().wait()


if __name__ == "__main__":
    run(compression_auto)
