"""ZeRO whose ranks send each other coded weights and gradients, end to end."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal.assembly.objects import UserObjects
from shoal.assembly.run import open_run
from shoal.launcher.environment import Place
from shoal.runfile.codec_rules import shard_codec_refusal
from shoal.runfile.rules import check_across
from shoal.verification.verify import verify_rank
from tests.assembly.journey import Leg, travel
from tests.ranks import TestPlace
from tests.verification.layouts import GPT, corpus, run_file_of

STEPS = 4
LOSS = 0.01
"""Relative, of 8 steps of a GPT of 30,000 numbers."""
BOTH = {"weights": "int8", "gradients": "int4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    corpus(folder)
    return folder


def tables(layout: dict[str, int], zero: int, **codec: str) -> dict[str, Any]:
    buckets = {"bucket_bytes": 40_000, "first_bucket_bytes": 10_000}
    return {
        "model": GPT, "layout": layout, "gradients": buckets, "memory": {"zero": zero}, "shard_codec": codec,
        "batch": {"micro_samples": 2},
    }  # fmt: skip


CASES = {
    "ZeRO-1": (2, tables({"shard": 2}, 1, gradients="int8")),
    "ZeRO-2": (2, tables({"shard": 2}, 2, gradients="int4")),
    "ZeRO-3": (2, tables({"shard": 2}, 3, **BOTH)),
    "ZeRO-3, bfloat16": (2, tables({"shard": 2}, 3, weights="bfloat16", gradients="bfloat16")),
    "replicas of ZeRO-3": (4, tables({"replicate": 2, "shard": 2}, 3, **BOTH)),
    "stages of ZeRO-3": (4, tables({"pipeline": 2, "shard": 2}, 3, **BOTH)),
    "contexts of ZeRO-3": (4, tables({"context": 2, "shard": 2}, 3, **BOTH)),
}


SLOW = {"ZeRO-3, bfloat16", "contexts of ZeRO-3"}


@pytest.mark.slow
@pytest.mark.matrix(every=3)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.stress] if case in SLOW else []) for case in CASES]
)
def test_a_resumed_run_is_the_same_run(ranks, folder: Path, case: str) -> None:
    """Stopped in the middle and gone on: the same bits. Losses are near those of exact pieces, and not the same."""
    world, choice = CASES[case]
    check_across(run_file_of(folder, **choice, run={"processes": world}), file="shards")
    name = case.replace(" ", "-")
    straight: Leg = ranks(world, travel, choice, str(folder), f"{name}-straight", 2 * STEPS)[0]
    legs = [ranks(world, travel, choice, str(folder), f"{name}-stopped", STEPS)[0] for _ in range(2)]
    exact = ranks(world, travel, choice | {"shard_codec": {}}, str(folder), f"{name}-exact", 2 * STEPS)[0]
    assert legs[0].losses + legs[1].losses == straight.losses
    assert legs[1].left.keys() == straight.left.keys()
    assert [key for key, value in straight.left.items() if not torch.equal(value, legs[1].left[key])] == []
    assert straight.losses != exact.losses
    for loss, wanted in zip(straight.losses, exact.losses, strict=True):
        assert loss == pytest.approx(wanted, rel=LOSS)


def test_checkpoints_hold_the_exact_weights(ranks, folder: Path) -> None:
    """What is saved before any step are the numbers that were drawn, not what other ranks decode of them."""
    coded = ranks(2, travel, tables({"shard": 2}, 3, weights="int8"), str(folder), "drawn-coded", 0)[0]
    exact = ranks(2, travel, tables({"shard": 2}, 3), str(folder), "drawn-exact", 0)[0]
    weights = [key for key in exact.left if key.startswith("model/")]
    assert weights
    for key in weights:
        assert torch.equal(coded.left[key], exact.left[key]), key


def between_hosts(place: TestPlace, choice: dict[str, Any], folder: str) -> dict[str, int]:
    """Bytes that this rank sent in one step, by collective."""
    run_file = run_file_of(Path(folder), **choice, wire={"check_collectives": False})
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    run = open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)
    with closing(run.feed()) as feed:
        run.step(1, feed.next().microbatches, lr=2e-3)
        result = run.step(2, feed.next().microbatches, lr=2e-3)
    return {name: entry.bytes_sent for name, entry in result.wire.items()}


def test_the_ledger_shows_fewer_bytes(ranks, folder: Path) -> None:
    """Weights in 8 bits and gradients in 4: a quarter, and an eighth, and the scales of both."""
    exact = ranks(2, between_hosts, tables({"shard": 2}, 3), str(folder))[0]
    coded = ranks(2, between_hosts, tables({"shard": 2}, 3, **BOTH), str(folder))[0]
    assert coded["all_gather"] < exact["all_gather"] / 3.7
    assert coded["all_to_all"] < exact["reduce_scatter"] / 6.8
    assert "reduce_scatter" not in coded


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        (tables({}, 3, weights="int8"), "layout.shard = 1"),
        (tables({"shard": 2, "tensor": 2}, 3, weights="int8"), "layout.tensor = 2"),
        (tables({"shard": 2}, 1, weights="int8"), "memory.zero = 1"),
        (tables({"shard": 2}, 3, gradients="int4") | {"observe": {"noise_every_steps": 5}}, "noise_every_steps"),
    ],
)
def test_what_it_cannot_serve_is_refused(folder: Path, choice: dict[str, Any], named: str) -> None:
    """In a sentence that names both keys; without the codec nothing is."""
    sentence = shard_codec_refusal(run_file_of(folder, **choice))
    assert sentence is not None
    assert named in sentence
    assert "shard_codec." in sentence
    assert shard_codec_refusal(run_file_of(folder, **choice | {"shard_codec": {}})) is None


def verify_with(place: TestPlace, folder: str) -> tuple[bool, str] | None:
    run_file = run_file_of(Path(folder), **tables({"shard": 2}, 3, **BOTH))
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    verdict = verify_rank(run_file, here, UserObjects(), steps=1, exact=False, store=place.store)
    return None if verdict is None else (verdict.holds, " ".join(verdict.notes))


def test_verify_proves_the_layout_without_them(ranks, folder: Path) -> None:
    """Instead of calling a gradient wrong that was never meant to be exact; and says so."""
    holds, notes = ranks(2, verify_with, str(folder))[0]
    assert holds
    assert "[shard_codec] was left out" in notes
