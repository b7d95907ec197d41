"""Table 4 of arXiv:2205.05198: forward and backward of one layer of the 22B model under each technique."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.cost.plan import Plan
from shoal.cost.transformer import Recompute, gpt
from shoal.planner.predict.bill import Constants
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.predict.stack import MEGATRON_2022
from shoal.topology.cluster_file import known_cluster
from shoal.topology.layout import Layout

FILE = "korthikanti_table4_layer_time.csv"
TECHNIQUES: tuple[tuple[str, bool, Recompute], ...] = (
    ("baseline no recompute", False, "none"),
    ("sequence parallel", True, "none"),
    ("baseline full recompute", False, "full"),
    ("selective recompute", False, "selective"),
    ("selective + SP", True, "selective"),
)


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


def layer_times(folder: Path, constants: Constants) -> Iterator[LayerTime]:
    """The five techniques, with the constants of their machine. Raises `OSError` where the table is missing."""
    with open(folder / FILE, newline="", encoding="utf-8") as file:
        measured = {
            row["technique"]: (float(row["fwd_ms"]) / 1e3, float(row["bwd_ms"]) / 1e3) for row in csv.DictReader(file)
        }
    for technique, sequence_parallel, recompute in TECHNIQUES:
        predicted = _layer(sequence_parallel, recompute, constants)
        yield LayerTime(technique=technique, measured_s=measured[technique], predicted_s=predicted)


def _layer(sequence_parallel: bool, recompute: Recompute, constants: Constants) -> tuple[float, float]:
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
