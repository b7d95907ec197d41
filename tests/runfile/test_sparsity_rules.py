"""Masks that another table cannot bear are refused in a sentence, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.runfile.federated_rules import federated_refusal
from shoal.runfile.sparsity_rules import partly_trained_refusal
from tests.verification.layouts import run_file_of

RIGL = {"sparsity": {"kind": "rigl", "density": 0.1}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sync": {"kind": "local"}}, 'sync.kind = "local"'),
    ({"elastic": {"min": 1, "max": 2}}, "[elastic]"),
    ({"codec": {"kind": "top_k"}}, 'codec.kind = "top_k"'),
    ({"optimizer": {"kind": "adamw_8bit"}}, 'optimizer.kind = "adamw_8bit"'),
    ({"optimizer": {"kind": "one_bit_adam"}}, 'optimizer.kind = "one_bit_adam"'),
    ({"gradients": {"schedule": "priority"}}, 'gradients.schedule = "priority"'),
    ({"layout": {"pipeline": 2}, "pipeline": {"schedule": "PipeDream"}}, "PipeDream"),
]


@pytest.mark.parametrize(("tables", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_masks_cannot_be_put_on(tmp_path: Path, tables: dict[str, Any], named: str) -> None:
    """The sentence names both keys; without masks there is none."""
    sentence = partly_trained_refusal(run_file_of(tmp_path, **tables, **RIGL))
    assert sentence is not None
    assert 'sparsity.kind = "rigl"' in sentence
    assert named in sentence
    assert partly_trained_refusal(run_file_of(tmp_path, **tables)) is None


FROZEN = {"freeze": {"later": [{"layers": ["embedding"], "at": 2}]}}
CACHED = {"freeze": {"layers": ["embedding"], "cache": "1 MiB"}}
LAYERS: list[tuple[dict[str, Any], str]] = [
    (FROZEN | {"codec": {"kind": "top_k"}}, 'freeze.later with codec.kind = "top_k"'),
    ({"freeze": {"progress": {}}, "sync": {"kind": "gossip"}}, 'freeze.progress with sync.kind = "gossip"'),
    ({"adapter": {"kind": "lora"}, "layout": {"tensor": 2}}, "[adapter] with layout.tensor = 2"),
    ({"quantisation": {}, "precision": {"kind": "float8"}}, '[quantisation] with precision.kind = "float8"'),
    ({"adapter": {"kind": "lora"}, "quantisation": {}}, "[adapter] with [quantisation]"),
    (CACHED | {"model": {"kind": "gpt", "dropout": 0.1}}, "freeze.cache with model.dropout = 0.1"),
    (CACHED | {"model": {"kind": "moe"}}, 'freeze.cache with model.kind = "moe"'),
    (CACHED | {"sync": {"kind": "gossip"}}, 'freeze.cache with sync.kind = "gossip"'),
    (CACHED | {"batch": {"division": "by_speed"}}, 'freeze.cache with batch.division = "by_speed"'),
]


@pytest.mark.parametrize(("tables", "named"), LAYERS, ids=[named for _, named in LAYERS])
def test_what_layers_cannot_bear(tmp_path: Path, tables: dict[str, Any], named: str) -> None:
    sentence = partly_trained_refusal(run_file_of(tmp_path, **tables))
    assert sentence is not None
    assert sentence.startswith(named)


def test_layers_that_are_frozen_from_the_start_go_with_everything(tmp_path: Path) -> None:
    always = {"freeze": {"layers": ["embedding"]}, "codec": {"kind": "top_k"}, "sync": {"kind": "local"}}
    assert partly_trained_refusal(run_file_of(tmp_path, **always)) is None


@pytest.mark.parametrize("table", [RIGL, FROZEN, {"adapter": {"kind": "lora"}}])
def test_clients_train_all_weights(tmp_path: Path, table: dict[str, Any]) -> None:
    sgd = {"optimizer": {"kind": "sgd", "lr": 0.1}, "federated": {"kind": "fedavg"}}
    sentence = federated_refusal(run_file_of(tmp_path, **sgd, **table))
    assert sentence is not None
    assert sentence.startswith(f"[{next(iter(table))}] with [federated]")


@pytest.mark.parametrize("schedule", [{"begin": 11}, {"end": 11}])
def test_a_run_that_ends_before_its_schedule(tmp_path: Path, schedule: dict[str, int]) -> None:
    table = {"kind": "magnitude", "density": 0.1, "schedule": schedule}
    sentence = partly_trained_refusal(run_file_of(tmp_path, sparsity=table))
    assert sentence is not None
    assert f"sparsity.schedule.{next(iter(schedule))} = 11 with run.steps = 10" in sentence
