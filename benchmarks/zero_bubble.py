"""The tables of the zero-bubble paper (arXiv:2401.10241) beside the simulator: bubble rates, throughput, memory.

    bubble rates   simulated by the authors from profiled T_F, T_B, T_W and T_comm; transfers overlap computation
    throughput     measured on A100s over RoCE; Megatron-LM synchronises the device after its batched send and receive,
                   so that sender and receiver do not compute for T_comm
    memory         measured peak; the table's unit is read as GiB, the unit of PyTorch's counters

All stages take equal time, as the profiled times do; for memory the first and the last hold a layer less, as they did.
ZB-1p and ZB-2p are `schedules.timeline.zero_bubble` with P and 2 P stored activations. No constant is fitted.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from shoal.cost.plan import Plan
from shoal.cost.transformer import gpt
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.predict.stack import MEGATRON_2022
from shoal.planner.simulate.outcome import bubble_rate, period_s
from shoal.planner.simulate.step import simulate_step
from shoal.planner.simulate.work import Message, Work, rank_bytes, uniform
from shoal.schedules.build import build
from shoal.schedules.table import ScheduleTable
from shoal.schedules.timeline import Times, zero_bubble
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

    def work(self, table: ScheduleTable) -> Work:
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


def _blocked(work: Work, transfer_s: float) -> Work:
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
