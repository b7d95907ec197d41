"""The tables of the zero-bubble paper (arXiv:2401.10241) beside the simulator: bubble rates, throughput, memory.

    bubble rates   simulated by the authors from profiled T_F, T_B, T_W and T_comm; transfers overlap computation
    throughput     measured on A100s over RoCE; Megatron-LM synchronises the device after its batched send and receive,
                   so that sender and receiver do not compute for T_comm
    memory         measured peak; the table's unit is read as GiB, the unit of PyTorch's counters

All stages take equal time, as the profiled times do; for memory the first and the last hold a layer less, as they did.
ZB-1p and ZB-2p are `zero_bubble` with P and 2 P stored activations. No constant is fitted.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType

from benchmarks.published import MEGATRON_2022
from shoal.cost.plan import Plan
from shoal.cost.transformer import gpt
from shoal.errors import LayoutError
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.simulate.outcome import period_s
from shoal.planner.simulate.step import simulate_step
from shoal.planner.simulate.work import Message, StepWork, rank_bytes, uniform
from shoal.schedules.build import build
from shoal.schedules.table import ScheduleTable, looped, woven
from shoal.schedules.timeline import timeline
from shoal.topology.cluster_file import known_cluster
from shoal.topology.layout import Layout

PROFILES = "zero_bubble_profiled_times_and_bubble_rates.csv"
MEASURED = "zero_bubble_table4.csv"
VOCABULARY = 50304
LAYERS = MappingProxyType({"1.5B": 24, "6.2B": 32, "14.6B": 48, "28.3B": 64})
"""Slots for layers: 2 more than layers, because the first and the last stage each leave one empty."""
_HEADS_AND_WIDTHS = MappingProxyType({"1.5B": (24, 2304), "6.2B": (32, 4096), "14.6B": (40, 5120), "28.3B": (48, 6144)})
WEIGHT_SHARES = MappingProxyType(
    {model: 32 * width / (34 * width + 5 * heads * 1024) for model, (heads, width) in _HEADS_AND_WIDTHS.items()}
)
"""The share of a stored activation that a deferred weight gradient keeps: 32sbh of sbh(34 + 5as/h), s = 1024."""

RATES = MappingProxyType(
    {
        "bubble_1F1B": "1F1B",
        "bubble_1F1B_I": "1F1B-I",
        "bubble_ZB_H1": "ZB-H1",
        "bubble_ZB_H2": "ZB-H2",
        "bubble_ZB_1p": "ZB-1p",
        "bubble_ZB_2p": "ZB-2p",
    }
)
"""The columns of bubble rates and the schedules that the paper calls so."""
STORED = MappingProxyType({"ZB-1p": 1, "ZB-2p": 2})
"""Activations that a rank may store, in units of the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One cell of the paper beside the simulator's. `what` is "bubble rate", "samples/s" or "peak GiB"."""

    what: str
    schedule: str
    model: str
    microbatches: int
    paper: float
    simulated: float

    @property
    def difference(self) -> float:
        """Simulated minus the paper's for bubble rates; relative to the paper's for everything else."""
        return self.simulated - self.paper if self.what == "bubble rate" else self.simulated / self.paper - 1


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Seconds of one microbatch on one pipeline rank."""

    microbatches: int
    forward_s: float
    input_s: float
    weight_s: float
    transfer_s: float

    @property
    def times(self) -> Times:
        """The same as `schedules.timeline` takes it."""
        return Times(forward_s=self.forward_s, input_s=self.input_s, weight_s=self.weight_s, send_s=self.transfer_s)

    def work(self, table: ScheduleTable) -> StepWork:
        """The work of equal stages, with transfers that overlap computation."""
        each = table.stages // table.ranks
        return uniform(
            table.stages,
            forward_s=self.forward_s / each,
            input_s=self.input_s / each,
            weight_s=self.weight_s / each,
            transfer_s=self.transfer_s,
        )


def bubble_rates(folder: Path) -> Iterator[Compared]:
    """Tables 5 and 6: bubble rates."""
    for cells in _cells(folder / PROFILES):
        profile = _profile(cells)
        for column, schedule in RATES.items():
            table = _table(schedule, cells["model"], int(cells["PP"]), profile.microbatches, profile)
            yield Compared(
                what="bubble rate",
                schedule=schedule,
                model=cells["model"],
                microbatches=profile.microbatches,
                paper=float(cells[column]),
                simulated=bubble_rate(table, profile.work(table)),
            )


def throughput(folder: Path) -> Iterator[Compared]:
    """ScheduleTable 4: samples a second of one GPU."""
    for cells, profile, table in _runs(folder):
        took_s = period_s(simulate_step(table, _blocked(profile.work(table), profile.transfer_s)))
        samples_s = table.microbatches * int(cells["micro_batch"]) / table.ranks / took_s
        yield _compared(cells, "samples/s", "samples_per_gpu_per_s", samples_s)


def peak_memory(folder: Path) -> Iterator[Compared]:
    """ScheduleTable 4: peak memory of the fullest rank."""
    for cells, _, table in _runs(folder):
        yield _compared(cells, "peak GiB", "peak_mem_GB", max(_rank_bytes(cells, table)) / 2**30)


def _runs(folder: Path) -> Iterator[tuple[dict[str, str], Profile, ScheduleTable]]:
    """Rows of table 4, each with the nearest profile of its model by number of microbatches, and its schedule."""
    profiles = [(cells["model"], _profile(cells)) for cells in _cells(folder / PROFILES)]
    for cells in _cells(folder / MEASURED):
        model, ranks, count = cells["model"], int(cells["PP(gpus)"]), int(cells["num_microbatches"])
        own = [profile for name, profile in profiles if name == model]
        nearest = min(own, key=lambda profile, count=count: abs(profile.microbatches - count))
        yield cells, nearest, _table(cells["schedule"], model, ranks, count, nearest)


def _blocked(work: StepWork, transfer_s: float) -> StepWork:
    """The same work with transfers during which neither side computes."""
    return replace(work, transfer=Message(busy_s=transfer_s), blocks_sender=True, blocks_receiver=True)


def _rank_bytes(cells: dict[str, str], table: ScheduleTable) -> tuple[float, ...]:
    samples, sequence = int(cells["micro_batch"]), int(cells["seq_len"])
    model = gpt(
        int(cells["layers"]), int(cells["hidden"]), int(cells["heads"]), vocabulary=VOCABULARY, positions=sequence
    )
    plan = Plan(
        layout=Layout(pipeline=table.ranks),
        microbatch=samples,
        microbatches=table.microbatches,
        virtual_stages=table.stages // table.ranks,
    )
    workload = Workload(model=model, global_samples=samples * table.microbatches, sequence=sequence)
    predictor = Predictor(workload, known_cluster("dgx-a100-80gb", table.ranks // 8), stack=MEGATRON_2022)
    layers = [LAYERS[cells["model"]] // table.stages] * table.stages
    layers[0], layers[-1] = layers[0] - 1, layers[-1] - 1
    return rank_bytes(plan, predictor, table, layers=layers)


def _table(schedule: str, model: str, ranks: int, microbatches: int, profile: Profile) -> ScheduleTable:
    """The table of a schedule by its name in the paper. Interleaved stages hold one layer each, as in the paper."""
    if schedule in STORED:
        return zero_bubble(
            ranks,
            microbatches,
            times=profile.times,
            most_stored=STORED[schedule] * ranks,
            weight_share=WEIGHT_SHARES[model],
        )
    name = "Interleaved1F1B" if schedule == "1F1B-I" else schedule
    each = LAYERS[model] // ranks if schedule == "1F1B-I" else 1
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=each)


def _compared(cells: dict[str, str], what: str, column: str, simulated: float) -> Compared:
    return Compared(
        what=what,
        schedule=cells["schedule"],
        model=cells["model"],
        microbatches=int(cells["num_microbatches"]),
        paper=float(cells[column]),
        simulated=simulated,
    )


def _profile(cells: dict[str, str]) -> Profile:
    names = {"forward_s": "TF_ms", "input_s": "TB_ms", "weight_s": "TW_ms", "transfer_s": "Tcomm_ms"}
    seconds = {name: float(cells[column]) / 1e3 for name, column in names.items()}
    return Profile(microbatches=int(cells["num_microbatches"]), **seconds)


def _cells(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def bubble_rate(table: ScheduleTable, work: StepWork) -> float:
    """1 - m (F + I + W) / period: how arXiv:2401.10241 counts it, for stages of equal times."""
    step = simulate_step(table, work)
    chunks = len(table.stages_of(0)) * table.microbatches
    stage = work.stages[0]
    computing = chunks * (stage.forward_s + stage.input_s + stage.weight_s)
    return 1 - computing / period_s(step)


# ZB-1p and ZB-2p, for stages whose F, I and W do not take equally long, under a limit on stored activations.
#
# ZB-H2 assumes F = I = W: rank r of P forwards 2 (P - 1 - r) microbatches before its first backward, and puts 2 r
# weight gradients off. In general a step has no bubble where every rank is busy from its first forward on, equally
# long. The first gradient comes back to rank r after the P - 1 - r stages behind it have done F and I, with a transfer
# c each way, and in that time the rank must forward; and rank r starts r (F + c) after the first and gets its last
# gradient r (I + c) before it, so that so much more work must be left for the end:
#
#     warm-up of rank r    (P - 1 - r) (F + I + 2c) / F     forwards
#     lag of rank r        r (F + I + 2c) / W               weight gradients
#
# With F = I = W and c = 0 these are ZB-H2's numbers. Neither may store more than `most_stored` activations; a gradient
# of weights that waits counts `weight_share` of one. Rounding is tried in a few ways, and the schedule with the
# shortest period is taken: what the heuristic of the paper's section 3.1 searches for step by step.


_STRETCHES = (0.8, 0.9, 1.0, 1.1)


_ROUNDINGS: tuple[Callable[[float], int], ...] = (math.ceil, round)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one microbatch on one stage, all stages alike, and of one transfer."""

    forward_s: float
    input_s: float
    weight_s: float
    send_s: float = 0.0

    @property
    def round_trip_s(self) -> float:
        """From a forward's end to its gradient's return, for each stage behind."""
        return self.forward_s + self.input_s + 2 * self.send_s


def zero_bubble(
    ranks: int, microbatches: int, *, times: Times, most_stored: int, weight_share: float = 1.0
) -> ScheduleTable:
    """One stage a rank. `most_stored` 2 P is the paper's ZB-2p, P its ZB-1p.

    Raises `LayoutError` where a rank may not even store what 1F1B does.
    """
    if most_stored < ranks:
        raise LayoutError(
            f"{most_stored} stored activations on {ranks} ranks: the first rank of 1F1B stores {ranks}; allow as many"
        )
    tables = _candidates(ranks, microbatches, times, most_stored, weight_share)
    return min(tables, key=lambda table: longest_s(table, times))


def _candidates(ranks: int, microbatches: int, times: Times, most: int, share: float) -> Iterator[ScheduleTable]:
    for stretch, rounded in product(_STRETCHES, _ROUNDINGS):
        rows = []
        for rank in range(ranks):
            ahead = min(rounded((ranks - 1 - rank) * times.round_trip_s / times.forward_s), most - 1 - rank)
            lag = rounded(stretch * rank * times.round_trip_s / times.weight_s)
            visits = [(rank, microbatch) for microbatch in range(microbatches)]
            rows.append(woven(visits, visits, warmup=ahead, lag=min(lag, int((most - 1 - ahead) / share))))
        yield ScheduleTable("zero bubble", ranks, ranks, microbatches, looped(ranks, 1), tuple(rows))


def longest_s(table: ScheduleTable, times: Times) -> float:
    """The longest time from a rank's first to its last action: what a step takes where no rank waits between steps."""
    played = timeline(
        table,
        forward_s=times.forward_s,
        backward_input_s=times.input_s,
        backward_weight_s=times.weight_s,
        send_s=times.send_s,
    )
    return max(row[-1][2] - row[0][1] for row in played.spans)
