"""Published steps of several projects, all in the columns of one table: a reader, and what each program was.

The files state the model, the layout, the machine and the seconds of a step; `tests/planner/published/README.md` names
where each is from. One row of each table calibrates its machine; nothing else of them was looked at for any constant.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from benchmarks.published import MEGATRON_2021, Row
from shoal.cost.footprint import MEGATRON_FP16, StateBytes
from shoal.cost.plan import Plan
from shoal.cost.transformer import Latent, Transformer
from shoal.planner.predict.predictor import Workload
from shoal.planner.predict.stack import MODERN, Stack
from shoal.topology.cluster import Cluster
from shoal.topology.cluster_file import cluster_from
from shoal.topology.layout import Layout

FILES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fsdp_llm_foundry.csv": ("7b s2048 on 8, micro",),
        "fsdp_torchtitan.csv": ("llama2-13b on 64, micro 2, recompute none", "llama3-8b on 8, micro 2"),
        "fsdp_fms.csv": ("llama2-7b",),
        "float8_torchtitan.csv": ("llama3-8b on 8, s8192", "llama3-8b on 32"),
        "float8_megatron_bridge.csv": ("llama3-8b on 8",),
        "fsdp_kempnerforge.csv": ("7b on 4, micro 4 x 2, tensor 1",),
        "experts_megatron_bridge.csv": ("GPT OSS 120B, s4096", "Qwen3"),
        "small_amp_t4.csv": ("t1 p4 d4 micro 1",),
        "small_oneflow_v100.csv": ("DP_8x1x1",),
    }
)
"""Each file, and how the names of the rows begin that calibrate its tables: of each table the first such row."""

DEEPSEEK: Mapping[str, Any] = MappingProxyType(
    {
        "shared_feed_forward": 2048,
        "dense_layers": 3,
        "dense_feed_forward": 18432,
        "latent": Latent(query=1536, keys=512, rotary=64),
    }
)
"""What the columns do not hold of DeepSeek-V3 (arXiv:2412.19437)."""

JOB = ("layers", "hidden", "devices", "sequence", "global_batch")
"""Rows of a table that agree in these are choices for the same job."""

_FSDP = StateBytes(weight=4, gradient=4, optimizer=8, activation=2, wire=4)
_EAGER = Stack(
    name="FSDP2, eager",
    state=_FSDP,
    eager=True,
    fused_weight_gradient=False,
    overlap_tensor=False,
    attention="flash-2",
    stops_early=True,
    eager_loss=True,
)
_KEMPNERFORGE = replace(
    _EAGER,
    name="KempnerForge",
    state=StateBytes(weight=2, gradient=2, optimizer=4, activation=2, wire=4),
    update_bytes=20.0,
    gathers_each=True,
    whole_loss=True,
)
"""Parameters and moments in bfloat16; `distributed/tensor_parallel.py` gathers inputs by column layer, and logits."""
_TORCHTITAN_FLOAT8 = replace(_EAGER, name="FSDP2, compiled, float8", eager=False, float8="dense", gathers_float8=True)
_BRIDGE_FLOAT8 = replace(MODERN, name="Megatron-Bridge, float8", float8="all", float8_casts="transformer-engine")
"""Its Llama 3.1 405B counts embedding and loss as layers of the pipeline's cut: 126 and two."""
STACKS: Mapping[str, Stack] = MappingProxyType(
    {
        "llm-foundry": replace(
            _EAGER, name="llm-foundry, FSDP", state=replace(_FSDP, wire=2), attention="triton", fused_loss=True
        ),
        "fsdp2-eager": _EAGER,
        "fsdp2-compiled": replace(_EAGER, name="FSDP2, compiled", eager=False),
        "fms-fsdp": replace(_EAGER, name="fms-fsdp, compiled", eager=False, state=replace(_FSDP, wire=2)),
        "kempnerforge": replace(_KEMPNERFORGE, eager=False),
        "kempnerforge-eager": _KEMPNERFORGE,
        "megatron-bridge": MODERN,
        "megatron-bridge-float8": _BRIDGE_FLOAT8,
        "megatron-bridge-float8-405b": replace(_BRIDGE_FLOAT8, balances_stages=True),
        "torchtitan-float8": _TORCHTITAN_FLOAT8,
        "torchtitan-float8-2025": replace(_TORCHTITAN_FLOAT8, fused_loss=True),
        "torchtitan-float8-async": replace(_TORCHTITAN_FLOAT8, overlap_tensor=True),
        "deepspeed-2020": replace(
            MEGATRON_2021, name="DeepSpeed with Megatron-LM 1.1.5", state=replace(MEGATRON_FP16, wire=4)
        ),
        "oneflow-2021": replace(MEGATRON_2021, name="OneFlow 0.3.5"),
    }
)
"""Facts of each program; AMP's `ds_config.json` sums gradients in float32."""


def steps(folder: Path, file: str) -> Iterator[Row]:
    """The rows of one file. Raises `OSError` where it is missing."""
    with open(folder / file, newline="", encoding="utf-8") as opened:
        for cells in csv.DictReader(opened):
            yield _row(cells)


def tables(folder: Path) -> Iterator[tuple[tuple[Row, ...], Row]]:
    """The rows of each table, and the row that calibrates it. Files that `folder` lacks are left out."""
    for file, starts in FILES.items():
        if not (folder / file).is_file():
            continue
        found: dict[str, list[Row]] = {}
        for row in steps(folder, file):
            found.setdefault(row.table, []).append(row)
        for rows in found.values():
            yield tuple(rows), next(row for row in rows if row.name.startswith(starts))


def _row(cells: Mapping[str, str]) -> Row:
    model, plan = _model(cells), _plan(cells)
    return Row(
        table=cells["table"],
        name=cells["row"],
        group=" ".join(cells[name] for name in JOB),
        workload=Workload(model=model, global_samples=plan.global_samples, sequence=int(cells["sequence"])),
        plan=plan,
        cluster=_cluster(cells),
        stack=STACKS[cells["stack"]],
        measured_s=float(cells["step_s"]),
        measured_bytes=float(cells["memory_gib"]) * 2**30 if cells["memory_gib"] else None,
    )


def _model(cells: Mapping[str, str]) -> Transformer:
    names = ("layers", "hidden", "heads", "kv_heads", "head_size", "feed_forward", "vocabulary")
    sizes: dict[str, Any] = {name: int(cells[name]) for name in names}
    if cells["model"] == "gpt":
        return Transformer(**sizes, biases=True, layer_norm=True, positions=int(cells["sequence"]))
    experts = int(cells["experts"])
    if cells["model"] == "deepseek-v3":
        return Transformer(
            **sizes, gated=True, tied=False, experts=experts, experts_per_token=int(cells["top_k"]), **DEEPSEEK
        )
    return Transformer(
        **sizes, gated=True, tied=False, experts=experts, experts_per_token=int(cells["top_k"]) if experts else 1
    )


def _plan(cells: Mapping[str, str]) -> Plan:
    axes = {axis: int(cells[axis]) for axis in ("replicate", "shard", "pipeline", "context", "tensor", "expert")}
    data, micro = axes["replicate"] * axes["shard"], int(cells["micro"])
    recompute, _, of = cells["recompute"].partition("/")
    return Plan(
        layout=Layout(**axes),
        microbatch=micro,
        microbatches=int(cells["global_batch"]) // (data * micro),
        schedule=cast(Any, cells["schedule"]),
        virtual_stages=int(cells["virtual"]),
        zero=cast(Any, int(cells["zero"])),
        recompute=cast(Any, "full" if of else recompute),
        recompute_share=1 / int(of) if of else 1.0,
        sequence_parallel=cells["sequence_parallel"] == "1",
    )


def _cluster(cells: Mapping[str, str]) -> Cluster:
    """Whole nodes of the machine, or a part of one."""
    devices = int(cells["devices"])
    table: dict[str, Any] = {"machine": cells["machine"], "nodes": 1}
    found = cluster_from({"cluster": table}, file=cells["row"])
    per_node = min(devices, int(cells["per_node"] or found.machine.devices))
    table |= {"nodes": devices // per_node, "devices_per_node": per_node}
    gbit = cells["scale_out_gbit"]
    link = {"scale_out": {"gb_s": float(gbit) / 8}} if gbit else {}
    return cluster_from({"cluster": table, **link}, file=cells["row"])
