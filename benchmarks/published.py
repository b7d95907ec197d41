"""Published step times, to compare predictions with: a reader for each table.

A row is a workload, a plan, the cluster and software that ran it, and the measured seconds. SC'21's table 1 gives
TFLOP/s with its own count of operations, 96 B s L h^2 (1 + s/6h + V/16Lh), from which the step time follows
(arXiv:2104.04473, equation 3). Korthikanti's table 4 (arXiv:2205.05198) has the times of
one layer alone.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cost.footprint import MEGATRON_FP16
from shoal.cost.plan import Plan
from shoal.cost.transformer import Recompute, gpt
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.predict.stack import Stack
from shoal.planner.predict.workload import Constants
from shoal.schedules.table import Schedule
from shoal.topology.cluster import Cluster
from shoal.topology.cluster_file import known_cluster
from shoal.topology.layout import Layout

SC21 = "narayanan_sc21_table1.csv"
SC21_SCALING = "narayanan_sc21_table2_zero3_vs_ptdp.csv"
KORTHIKANTI = "korthikanti_table3_table5.csv"
VTRAIN_MULTI = "vtrain_measured_multi.csv"
VTRAIN_SINGLE = "vtrain_measured_single.csv"
LAYER_TIMES = "korthikanti_table4_layer_time.csv"
LAYER_TECHNIQUES: tuple[tuple[str, bool, Recompute], ...] = (
    ("baseline no recompute", False, "none"),
    ("sequence parallel", True, "none"),
    ("baseline full recompute", False, "full"),
    ("selective recompute", False, "selective"),
    ("selective + SP", True, "selective"),
)
"""Name in the table, sequence parallelism, recomputation."""
SEQUENCE, VOCABULARY = 2048, 51200
VTRAIN_VOCABULARY = 50304
MEGATRON_2021 = Stack(
    name="Megatron-LM, April 2021 (arXiv:2104.04473)",
    state=MEGATRON_FP16,
    dtype="float16",
    flash_attention=False,
    dropout=True,
    fused_weight_gradient=False,
    overlap_tensor=False,
    overlap_data=False,
    overlap_pipeline=False,
)
MEGATRON_2022 = replace(
    MEGATRON_2021, name="Megatron-LM, May 2022 (arXiv:2205.05198)", fused_weight_gradient=True, overlap_tensor=True
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured step. The rows of a `group` are different plans for the same job; `measured_bytes` is the published
    peak of its fullest rank, where there is one."""

    table: str
    name: str
    group: str
    workload: Workload
    plan: Plan
    cluster: Cluster
    stack: Stack
    measured_s: float
    measured_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer: (forward, backward), measured and predicted."""

    technique: str
    measured_s: tuple[float, float]
    predicted_s: tuple[float, float]

    @property
    def error(self) -> float:
        """Predicted over measured, less one, of forward and backward together."""
        return sum(self.predicted_s) / sum(self.measured_s) - 1


def sc21(folder: Path) -> Iterator[Row]:
    """Table 1 of arXiv:2104.04473: full recomputation, interleaved where it has virtual stages."""
    for cells in _cells(folder / SC21):
        model = gpt(int(cells["layers"]), int(cells["hidden"]), int(cells["heads"]), vocabulary=VOCABULARY)
        batch, gpus = int(cells["global_batch"]), int(cells["gpus"])
        rate = float(cells["tflops_per_gpu(counts recompute)"]) * 1e12
        work = _sc21_flops(batch, model.layers, model.hidden)
        yield Row(
            table="SC'21 table 1",
            name=cells["model"],
            group=cells["model"],
            workload=Workload(model=model, global_samples=batch, sequence=SEQUENCE),
            plan=_megatron(
                cells["TP"],
                cells["PP"],
                cells["DP"],
                cells["micro_batch"],
                batch,
                virtual=int(cells["virtual_stages_per_rank"]),
            ),
            cluster=known_cluster("dgx-a100-80gb", gpus // 8),
            stack=MEGATRON_2021,
            measured_s=work / (rate * gpus),
        )


def korthikanti(folder: Path) -> Iterator[Row]:
    """Tables 3 and 5 of arXiv:2205.05198; rows without a time are left out."""
    for cells in _cells(folder / KORTHIKANTI):
        if not cells["iter_time_s"]:
            continue
        model = gpt(int(cells["layers"]), int(cells["hidden"]), int(cells["heads"]), vocabulary=VOCABULARY)
        batch, gpus = int(cells["global_batch"]), int(cells["gpus"])
        selective = cells["technique"].startswith("SP + selective")
        yield Row(
            table="Korthikanti tables 3, 5",
            name=f"{cells['model']} {'selective' if selective else 'full'} x{cells['DP']}",
            group=f"{cells['model']} x{cells['DP']}",
            workload=Workload(model=model, global_samples=batch, sequence=SEQUENCE),
            plan=_megatron(
                cells["TP"],
                cells["PP"],
                cells["DP"],
                cells["micro_batch"],
                batch,
                virtual=int(cells["interleave_v"]),
                selective=selective,
            ),
            cluster=known_cluster("dgx-a100-80gb", max(1, gpus // 8)),
            stack=MEGATRON_2022,
            measured_s=float(cells["iter_time_s"]),
        )


def sc21_scaling(folder: Path) -> Iterator[Row]:
    """Table 2 of arXiv:2104.04473, the rows of tensor and pipeline parallelism; v = 2 and 3 as in table 1."""
    shapes = {"96": (96, 12288, 96, 12, 2), "280": (105, 20480, 128, 35, 3)}
    for cells in _cells(folder / SC21_SCALING):
        if cells["scheme"] != "PTD-P":
            continue
        layers, hidden, heads, pipeline, virtual = shapes[cells["model_parallel_size"]]
        batch, gpus = int(cells["global_batch"]), int(cells["gpus"])
        data = gpus // int(cells["model_parallel_size"])
        yield Row(
            table="SC'21 table 2",
            name=f"{cells['params_B']}B on {gpus}",
            group=f"{cells['params_B']}B on {gpus}",
            workload=Workload(
                model=gpt(layers, hidden, heads, vocabulary=VOCABULARY), global_samples=batch, sequence=SEQUENCE
            ),
            plan=_megatron("8", str(pipeline), str(data), cells["micro_batch"], batch, virtual=virtual),
            cluster=known_cluster("dgx-a100-80gb", gpus // 8),
            stack=MEGATRON_2021,
            measured_s=_sc21_flops(batch, layers, hidden) / (float(cells["tflops_per_gpu"]) * 1e12 * gpus),
        )


def vtrain(folder: Path, *, file: str, table: str) -> Iterator[Row]:
    """vTrain's measured Megatron steps: full recomputation, 1F1B, eight A100 and 800 Gb/s a node."""
    for cells in _cells(folder / file):
        hidden, heads, layers = int(cells["hidden size"]), int(cells["attention heads"]), int(cells["# layers"])
        axes = [cells[f"{axis} parallelism"] for axis in ("tensor", "pipeline", "data")]
        gpus = int(axes[0]) * int(axes[1]) * int(axes[2])
        batch, sequence = int(cells["global batch"]), int(cells["sequence length"])
        job = f"h{hidden} L{layers} on {gpus}, batch {batch}"
        yield Row(
            table=table,
            name=f"{job}: t{axes[0]} p{axes[1]} d{axes[2]} micro {cells['micro batch']}",
            group=job,
            workload=Workload(
                model=gpt(layers, hidden, heads, vocabulary=VTRAIN_VOCABULARY, positions=sequence),
                global_samples=batch,
                sequence=sequence,
            ),
            plan=_megatron(axes[0], axes[1], axes[2], cells["micro batch"], batch),
            cluster=known_cluster("a100-4nic", max(1, gpus // 8)),
            stack=MEGATRON_2021,
            measured_s=float(cells["iteration time (ms)"]) / 1e3,
        )


def layer_times(folder: Path, constants: Constants) -> Iterator[LayerTime]:
    """Table 4 of arXiv:2205.05198: one layer of the 22B model under each technique, predicted with `constants`.

    Raises `OSError` where the table is missing.
    """
    measured = {
        cells["technique"]: (float(cells["fwd_ms"]) / 1e3, float(cells["bwd_ms"]) / 1e3)
        for cells in _cells(folder / LAYER_TIMES)
    }
    for technique, sequence_parallel, recompute in LAYER_TECHNIQUES:
        predicted = _predicted_layer(sequence_parallel, recompute, constants)
        yield LayerTime(technique=technique, measured_s=measured[technique], predicted_s=predicted)


def _megatron(
    tensor: str, pipeline: str, data: str, micro: str, batch: int, *, virtual: int = 1, selective: bool = False
) -> Plan:
    """Megatron's order of ranks: tensor innermost, data next, pipeline outermost; no ZeRO."""
    schedule: Schedule = "Interleaved1F1B" if virtual > 1 else "1F1B"
    return Plan(
        layout=Layout(shard=int(data), pipeline=int(pipeline), tensor=int(tensor)),
        microbatch=int(micro),
        microbatches=max(1, batch // (int(data) * int(micro))),
        schedule=schedule,
        virtual_stages=virtual,
        recompute="selective" if selective else "full",
        sequence_parallel=selective,
    )


def _sc21_flops(batch: int, layers: int, hidden: int) -> float:
    share = 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    return 96.0 * batch * SEQUENCE * layers * hidden**2 * share


def _predicted_layer(sequence_parallel: bool, recompute: Recompute, constants: Constants) -> tuple[float, float]:
    workload = Workload(model=gpt(48, 6144, 64), global_samples=4, sequence=2048)
    predictor = Predictor(workload, known_cluster("dgx-a100-80gb", 1), stack=MEGATRON_2022, constants=constants)
    plan = Plan(
        layout=Layout(tensor=8),
        microbatch=4,
        microbatches=1,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    layer = predictor.layer(plan)
    return layer.forward_s, layer.input_s + layer.weight_s


def _cells(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
