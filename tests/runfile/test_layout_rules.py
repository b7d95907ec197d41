"""A layout that cannot be is refused by a sentence that names the number and the nearest ones that can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.assembly.splitting import microbatching, table_of
from shoal.errors import ShoalError
from shoal.runfile.rules import check_across
from tests.models.huggingface.architectures import MIXTRAL
from tests.verification.layouts import GPT, MOE, run_file_of

PIPEDREAM = {"layout": {"pipeline": 2}, "pipeline": {"schedule": "PipeDream"}}


def updates(number: int, **layout: int) -> dict[str, Any]:
    """So many updates in each step of 8 samples."""
    return {"layout": {"pipeline": 2, **layout}, "pipeline": {"schedule": "PipeDream", "microbatches": number}}


GRAPHED = {"compile": "blocks", "compile_mode": "reduce-overhead"}
REFUSED: list[tuple[int, dict[str, Any], list[str]]] = [
    (6, {"layout": {"tensor": 4}}, ["6 processes", "tensor=4", "tensor=3"]),
    (4, {"layout": {"tensor": 2, "replicate": 3}}, ["4 processes", "6", "replicate=2"]),
    (3, {"layout": {"tensor": 3}}, ["layout.tensor = 3", "model.heads = 4", "2 or 4", "3 or 6"]),
    (8, {"layout": {"tensor": 8}, "model": GPT | {"heads": 8}, "batch": {"sequence": 15}}, []),
    (2, {"layout": {"context": 2}, "batch": {"sequence": 18}}, ["batch.sequence = 18", "4", "16 or 20"]),
    (2, {"layout": {"tensor": 2, "sequence_parallel": True}, "batch": {"sequence": 15}}, ["15", "2", "14 or 16"]),
    (1, {"layout": {"sequence_parallel": True}, "memory": {"zero": 2}}, []),  # of one rank, nothing is split
    (2, {"layout": {"tensor": 2}, "run": {"compile": True}}, ["run.compile = true", "layout.tensor"]),
    (2, {"layout": {"tensor": 2}, "run": {"compile": "blocks"}}, ['run.compile = "blocks"', "layout.tensor"]),
    (2, {"layout": {"shard": 2}, "run": {"compile": True}}, ["memory.zero = 3", 'set run.compile = "blocks"']),
    (2, {"layout": {"shard": 2}, "run": {"compile": "blocks"}}, []),
    (2, {"layout": {"shard": 2}, "memory": {"zero": 2}, "run": {"compile": "model"}}, []),
    (2, {"layout": {"shard": 2}, "run": GRAPHED}, ["reduce-overhead", "memory.zero = 3", "max-autotune-no-cudagraphs"]),
    (2, {"layout": {"shard": 2}, "memory": {"zero": 2}, "run": GRAPHED}, []),
    (2, {"run": GRAPHED, "batch": {"micro_samples": 2}}, ["reduce-overhead", "microbatches of 2 samples"]),
    (2, {"run": GRAPHED, "batch": {"micro_samples": 4}}, []),
    (2, {"run": GRAPHED | {"compile_mode": "max-autotune-no-cudagraphs"}, "batch": {"micro_samples": 2}}, []),
    (4, {"layout": {"shard": 4, "expert": 3}, "model": MOE}, ["expert=3", "2 or expert=4"]),
    (3, {"layout": {"shard": 3, "expert": 3}, "model": MOE}, ["layout.expert = 3", "experts = 4", "2 or 4", "3 or 6"]),
    (2, {"layout": {"shard": 2, "expert": 2}}, ["layout.expert", "moe"]),
    (3, {"layout": {"shard": 3, "expert": 3}, "model": MIXTRAL}, ["model.config.num_local_experts = 4", "2 or 4"]),
    (2, {"layout": {"shard": 2, "expert": 2}, "model": MIXTRAL}, []),
    (2, {"memory": {"zero": 2}}, ["memory.zero = 2", "layout.shard"]),
    (8, {"layout": {"pipeline": 8}}, ["8 stages", "5 parts"]),
    (2, {"layout": {"pipeline": 2}, "pipeline": {"schedule": "DualPipeV", "microbatches": 2}}, ["DualPipeV", "2", "4"]),
    (2, {"layout": {"shard": 2}, "batch": {"global_samples": 1}}, ["batch.global_samples = 1", "raise it to 2"]),
    (4, {"layout": {"tensor": 4, "tensor_grid": [2, 3]}}, ["tensor_grid = [2, 3]", "6 places", "layout.tensor = 4"]),
    (
        4,
        {"layout": {"tensor": 4, "tensor_grid": [1, 4]}, "model": GPT | {"kv_heads": 2}},
        ["kv_heads = 2", "nearest: 4"],
    ),
    (
        2,
        {"layout": {"tensor": 2, "tensor_grid": [2, 1]}, "batch": {"sequence": 15}},
        ["batch.sequence = 15", "14 or 16"],
    ),
    (4, {"layout": {"tensor": 4, "tensor_grid": [2, 2]}, "model": GPT | {"kv_heads": 2}}, []),
    (4, {"layout": {"tensor": 4}, "model": GPT | {"feed_forward_width": 26}}, ["layout.tensor = 4", "26"]),
    (4, {"layout": {"tensor": 4, "tensor_grid": [2, 2]}, "model": GPT | {"feed_forward_width": 26}}, []),
    (
        4,
        {"layout": {"tensor": 4, "tensor_grid": [2, 2]}, "model": GPT | {"feed_forward_width": 27}},
        ["model.feed_forward_width = 27", "2 panels", "26 or 28"],
    ),
    (2, updates(5), ["pipeline.microbatches = 5", "microbatches of 2 make 4 updates", "nearest: 4 or 8"]),
    (2, updates(100), ["8 samples in microbatches of 1 make 8 updates", "nearest: 8"]),
    (4, updates(3, replicate=2), ["4 samples in microbatches of 2 make 2 updates", "nearest: 2 or 4"]),
    (4, updates(4, replicate=2), []),
    (1, {"pipeline": {"schedule": "PipeDream"}}, ["PipeDream", "layout.pipeline = 1", "2 or more"]),
    (4, PIPEDREAM | {"layout": {"pipeline": 2, "shard": 2}}, ["PipeDream", "layout.shard = 2", "layout.replicate"]),
    (
        4,
        PIPEDREAM | {"layout": {"pipeline": 2, "tensor": 2, "expert": 2}, "model": MIXTRAL},
        ["PipeDream", "layout.expert = 2", "set it to 1"],
    ),
    (2, PIPEDREAM | {"model": MOE}, ["PipeDream", 'model.kind = "moe"']),
    (2, PIPEDREAM | {"model": GPT | {"tied": True}}, ["PipeDream", "model.tied", "set it to false"]),
    (2, PIPEDREAM | {"precision": {"kind": "float16"}}, ["PipeDream", "float16", "bfloat16"]),
    (2, PIPEDREAM | {"optimizer": {"lr_for_samples": 8}}, ["PipeDream", "lr_for_samples"]),
    (
        2,
        PIPEDREAM | {"pipeline": {"schedule": "PipeDream", "microbatches": 4}, "batch": {"micro_samples": 2}},
        ["pipeline.microbatches and batch.micro_samples", "leave one out"],
    ),
    (
        4,
        {"layout": {"context": 4}, "context": {"kind": "ulysses"}, "model": GPT | {"heads": 2}},
        ["layout.context = 4"],
    ),
]


@pytest.mark.parametrize(("processes", "tables", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_layout_that_cannot_be_is_refused(processes: int, tables: dict[str, Any], words: list[str]) -> None:
    """Before any process starts, with the numbers that would do."""
    run_file = run_file_of(Path("/nowhere"), **tables)
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=processes))
    if not words:  # legal
        _check(run_file, processes)
        return
    with pytest.raises(ShoalError) as refusal:
        _check(run_file, processes)
    for word in words:
        assert word in str(refusal.value)


def _check(run_file: Any, processes: int) -> None:
    layout = run_file.layout.layout(processes)
    check_across(run_file, file="layouts.toml")
    table_of(run_file, microbatching(run_file, layout).in_flight)
