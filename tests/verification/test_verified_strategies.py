"""`shoal verify` of strategies: one process plays the rule of the paper, and both go on by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.verification.refusals import require_provable
from shoal.verification.strategies import steps_of
from tests.verification.foreign_models import PICTURES, foreign
from tests.verification.layouts import GPT, MOE, corpus, run_file_of, verified
from tests.verification.planted_in_agreements import verified_with

Tables = dict[str, Any]

SMALL = GPT | {"layers": 1, "width": 16, "feed_forward_width": 24}
SGD: Tables = {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}}
DILOCO = {"kind": "local", "period": 2}
AVERAGE = DILOCO | {"outer_lr": 1.0, "outer_momentum": 0.0}
SLOWMO = DILOCO | {"outer_lr": 1.0, "nesterov": False, "per_lr": True}
ADASUM = AVERAGE | {"period": 1, "merge": "adasum"}
STREAMING = {"kind": "streaming", "period": 4, "fragments": 2, "delay": 1}
EASGD = {"kind": "easgd", "period": 2, "beta": 0.6}
PUSH_SUM = {"kind": "gossip", "algorithm": "sgp", "graph": "neighbours", "neighbours": [[1, 2], [2], [0]]}
WARM = {"schedule": {"warmup_steps": 4}}
NORMS: Tables = {"data": PICTURES, "model": foreign("conv_norm", {"batch_norm": "grouped", "group_samples": 2})}
UNEVEN = {"batch": {"global_samples": 5, "denominator": "samples"}}

RULES: list[tuple[int, bool, Tables]] = [
    (2, False, {"sync": DILOCO, **UNEVEN}),
    (2, True, {"sync": DILOCO | {"nesterov": False}, "optimizer": {"clip_norm": 0.5}}),
    (2, True, {"sync": AVERAGE | {"warmup_steps": 1}, **SGD}),
    (3, True, {"sync": SLOWMO, **WARM}),
    (2, True, {"sync": DILOCO | {"period": 4, "adapt_every": 4}, **SGD}),
    (3, True, {"sync": ADASUM, "batch": {"global_samples": 12, "micro_samples": 2}, **SGD}),
    (2, True, {"sync": STREAMING}),
    (3, False, {"sync": EASGD, **SGD}),
    (3, False, {"sync": {"kind": "gossip", "graph": "ring"}}),
    (4, True, {"sync": {"kind": "gossip", "graph": "exponential", "meet_every": 3}, **SGD}),
    (4, True, {"sync": {"kind": "gossip", "graph": "torus", "algorithm": "sgp", "delay": 1, "meet_every": 3}}),
    (3, True, {"sync": PUSH_SUM}),
    (2, True, {"sync": {"kind": "gossip", "graph": "weights", "weights": [[0.75, 0.25], [0.25, 0.75]]}}),
    (2, False, {"sync": {"kind": "server"}}),
    (3, True, {"sync": {"kind": "server", "servers": 1, "period": 2}, **SGD}),
    (2, True, {"sync": {"kind": "server", "admission": "bounded", "bound": 0, "period": 2}}),
]
"""Ranks, whether in float64, and tables."""

SPLIT: list[tuple[int, bool, Tables]] = [
    (4, False, {"sync": DILOCO, "layout": {"replicate": 2, "shard": 2}, "memory": {"zero": 3}}),
    (4, True, {"sync": EASGD, "layout": {"replicate": 2, "tensor": 2}, "model": GPT}),
    (4, True, {"sync": STREAMING, "layout": {"replicate": 2, "pipeline": 2}, "model": GPT}),
    (4, False, {"sync": {"kind": "gossip"}, "layout": {"replicate": 2, "context": 2}}),
    (2, False, {"sync": DILOCO, "model": MOE}),
    (2, True, {"sync": DILOCO, **NORMS}),
    (2, False, {"sync": DILOCO, "codec": {"kind": "sign"}, "precision": {"kind": "bfloat16"}}),
]  # fmt: skip

PLANTED: dict[str, tuple[int, Tables]] = {
    "momentum_left_out": (2, {"sync": DILOCO}),
    "momentum_of_the_step_before": (2, {"sync": DILOCO}),
    "momentum_not_in_units_of_the_rate": (2, {"sync": SLOWMO, **WARM}),
    "replicas_count_alike": (2, {"sync": AVERAGE, **UNEVEN}),
    "parameters_are_merged_as_one": (2, {"sync": ADASUM}),
    "a_replica_keeps_its_own": (2, {"sync": AVERAGE}),
    "period_never_shrinks": (2, {"sync": DILOCO | {"period": 4, "adapt_every": 4}}),
    "pull_as_if_alone": (2, {"sync": EASGD}),
    "fragments_replace_parameters": (2, {"sync": STREAMING}),
    "weights_of_another_graph": (3, {"sync": {"kind": "gossip", "graph": "ring"}}),
    "edges_turned_round": (3, {"sync": {"kind": "gossip"}}),
    "not_divided_by_the_weight": (3, {"sync": PUSH_SUM}),
    "a_share_is_lost": (3, {"sync": {"kind": "gossip", "graph": "ring"}}),
    "a_worker_does_not_count": (2, {"sync": {"kind": "server"}}),
    "served_with_a_stale_gradient": (2, {"sync": {"kind": "server"}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("strategies")
    corpus(folder)
    return folder


def tables_of(tables: Tables) -> Tables:
    batch = {"global_samples": 12, "sequence": 8} | tables.get("batch", {})
    return {"model": SMALL, "run": {"steps": 12}} | tables | {"batch": batch}


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.parametrize(("world", "exact", "tables"), RULES, ids=lambda value: str(value)[:90])
def test_replicas_go_the_way_of_the_rule(ranks, folder: Path, world: int, exact: bool, tables: Tables) -> None:
    """Over several agreements, every replica's gradients, and its weights before and after each of them."""
    verdict, *_ = ranks(world, verified, tables_of(tables), str(folder), exact, None)
    assert verdict["holds"], verdict["sentence"]
    assert f'sync.kind = "{tables["sync"]["kind"]}"' in verdict["rule"]
    assert max(row["step"] for row in verdict["rows"] if row["quantity"] == "agreement") >= 5


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize(("world", "exact", "tables"), SPLIT, ids=lambda value: str(value)[:110])
def test_replicas_of_any_kind_go_the_way_of_the_rule(
    ranks, folder: Path, world: int, exact: bool, tables: Tables
) -> None:
    """Split inside, with routes, with running statistics, with a codec that is left out."""
    verdict, *_ = ranks(world, verified, tables_of(tables), str(folder), exact, None)
    assert verdict["holds"], verdict["sentence"]
    assert ("codec" in tables) == any("codec.kind" in note for note in verdict["notes"])


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_mistake_is_caught_in_the_agreement(ranks, folder: Path, fault: str) -> None:
    """Gradients and the replicas' own updates are right, and the sentence says what one process plays instead."""
    world, tables = PLANTED[fault]
    verdict, *_ = ranks(world, verified_with, fault, tables_of(tables), str(folder))
    assert not verdict["holds"]
    assert verdict["first"]["quantity"] == "agreement", verdict["sentence"]
    assert f"the agreement is not {verdict['rule']}" in verdict["sentence"]


def test_a_mistake_of_one_replica_is_not_the_agreements(ranks, folder: Path) -> None:
    """A gradient that is wrong before replicas agree is named as such, on the replica that found it."""
    verdict, *_ = ranks(2, verified_with, "gradient_of_one_replica", tables_of({"sync": DILOCO}), str(folder))
    assert (verdict["first"]["quantity"], verdict["first"]["rank"]) == ("gradient", 1), verdict["sentence"]


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ({"kind": "hogwild"}, "an order that time decides"),
        ({"kind": "server", "admission": "async"}, "shoal train --replay RUN_DIR"),
        ({"kind": "server", "admission": "bounded", "bound": 1}, "shoal train --replay RUN_DIR"),
        ({"kind": "server", "admission": "backup", "backup": 1}, 'verify sync.admission = "sync"'),
    ],
    ids=str,
)
def test_what_time_decides_is_refused(tmp_path: Path, sync: Tables, words: str) -> None:
    """In a sentence that says what to do instead."""
    with pytest.raises(ConfigError, match=words):
        require_provable(run_file_of(tmp_path, sync=sync))


def test_streaming_on_cut_fragments_is_refused(ranks, folder: Path) -> None:
    """Where the ranks of a replica have the same tensors in other fragments."""
    tables = {"sync": STREAMING, "layout": {"replicate": 2, "shard": 2}, "memory": {"zero": 3}}
    outcomes = ranks.outcomes(4, verified, tables_of(tables), str(folder), False, 2)
    assert all(not worked and "layout.replicate alone" in said for worked, said in outcomes)


@pytest.mark.parametrize(
    ("sync", "wanted"),
    [
        ({"kind": "local", "period": 50}, 101),
        ({"kind": "local", "period": 600}, 1000),
        ({"kind": "gossip", "graph": "ring"}, 5),
        ({"kind": "server"}, 5),
    ],
    ids=str,
)
def test_as_many_steps_as_show_the_rule(tmp_path: Path, sync: Tables, wanted: int) -> None:
    """Two periods and a step; no more than the run has."""
    assert steps_of(run_file_of(tmp_path, sync=sync, run={"steps": 1000}), 4, least=5) == wanted


def test_rows_that_servers_hold_are_refused(ranks, folder: Path) -> None:
    """No worker has an embedding table's weights to compare."""
    build = {"kind": "python", "build": "tests.verification.table_models:recommender"}
    data = {"kind": "python", "build": "tests.verification.table_models:clicks"}
    loss = {"kind": "python", "build": "tests.verification.table_models:click_loss"}
    tables = {"model": build, "data": data, "loss": loss, "optimizer": {"kind": "sgd", "lr": 0.1, "clip_norm": None}}
    outcomes = ranks.outcomes(2, verified, tables_of(tables | {"sync": {"kind": "server"}}), str(folder), False, 2)
    assert all(not worked and "its rows lie on the servers alone" in said for worked, said in outcomes)
