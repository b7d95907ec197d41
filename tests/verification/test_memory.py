"""`shoal verify` of what `[memory]` moves or computes again: proved, or said to have done nothing; faults are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.ranks import TestPlace
from tests.verification.foreign_models import foreign
from tests.verification.layouts import GPT, corpus, verified

STEPS = 3
LARGE = {"model": GPT | {"width": 64, "heads": 4}, "batch": {"global_samples": 8, "sequence": 64}}
"""Blocks save tensors that are large enough to be moved."""
HOST = {"optimizer": "host", "activations": "host", "parameters": "host"}


def budget(size: str) -> dict[str, Any]:
    return {"recompute": "budget", "recompute_budget": size}


PROVED: dict[str, tuple[int, dict[str, Any]]] = {
    "budget": (1, {**LARGE, "memory": budget("300 KiB")}),
    "budget, ZeRO-3": (2, {**LARGE, "layout": {"shard": 2}, "memory": budget("300 KiB") | {"zero": 3}}),
    "state on the host": (1, {**LARGE, "memory": {"offload": {"optimizer": "host"}}}),
    "state on disk, ZeRO-1": (
        2,
        {**LARGE, "layout": {"shard": 2}, "memory": {"zero": 1, "offload": {"optimizer": "disk"}}},
    ),
    "delayed updates": (1, {**LARGE, "memory": {"offload": {"optimizer": "host", "delay_update_after": 0}}}),
    "delayed updates, ZeRO-3": (
        2,
        {**LARGE, "layout": {"shard": 2}, "memory": {"offload": {"optimizer": "disk", "delay_update_after": 0}}},
    ),
    "activations on the host": (
        2,
        {**LARGE, "layout": {"replicate": 2}, "memory": {"offload": {"activations": "host"}}},
    ),
    "all on the host": (1, {**LARGE, "memory": {"recompute": "full", "offload": HOST}}),
    "built by parts": (
        2,
        {"model": foreign("nested"), "layout": {"shard": 2}, "memory": {"zero": 3, "build": "parts"}},
    ),
}
FEW = ("budget", "activations on the host")
"""What every test run proves."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    corpus(folder)
    return folder


@pytest.mark.parametrize(
    "case", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in PROVED]
)
def test_it_is_proved(ranks, folder: Path, case: str) -> None:
    """Losses, gradients and weights are those of one process that keeps all; and the key had an effect."""
    world, tables = PROVED[case]
    verdict, *_ = ranks(world, verified, tables, str(folder), False, STEPS)
    assert verdict["holds"], verdict["sentence"]
    assert verdict["notes"] == []


UNPROVED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing is large enough": ({"memory": {"offload": {"activations": "host"}}}, "moved nothing that blocks save"),
    "no state is, either": ({"memory": {"offload": {"optimizer": "host"}}}, "moved no state of the optimizer"),
    "all fits": ({"memory": budget("1 GiB")}, "nothing was computed again after the first step"),
    "a first delayed update that comes later": (
        {**LARGE, "memory": {"offload": {"optimizer": "host", "delay_update_after": 40}}},
        "delay_update_after = 40 was taken as 0",
    ),
    "8 bits": ({**LARGE, "memory": {"offload": {"activation_bits": 8}}}, "activation_bits was left out"),
}


@pytest.mark.parametrize("case", UNPROVED)
def test_what_is_not_proved_is_said(ranks, folder: Path, case: str) -> None:
    """The verdict holds, with a note on what it does not say."""
    tables, said = UNPROVED[case]
    verdict, *_ = ranks(1, verified, tables, str(folder), False, STEPS)
    assert verdict["holds"], verdict["sentence"]
    assert [said in note for note in verdict["notes"]] == [True]


@contextmanager
def first_bytes_lost() -> Iterator[None]:
    """What comes back from the host has zeros at its beginning."""
    from shoal.memory.tiers import HostTier

    fetch = HostTier.fetch

    def forgetful(self: Any, image: Any, targets: list[Tensor]) -> Any:
        found = fetch(self, image, targets)
        for target in targets:
            target.view(-1)[:4096].zero_()
        return found

    with patch.object(HostTier, "fetch", forgetful):
        yield


def verified_with_loss(place: TestPlace, tables: dict[str, Any], folder: str) -> dict[str, Any] | None:
    with first_bytes_lost():
        return verified(place, tables, folder, False, STEPS)


@pytest.mark.parametrize(
    ("case", "quantity"), [("state on the host", "weight"), ("activations on the host", "gradient")]
)
def test_what_comes_back_wrong_is_found(ranks, folder: Path, case: str, quantity: str) -> None:
    """Moments and activations that lose some numbers on their way."""
    world, tables = PROVED[case]
    verdict, *_ = ranks(world, verified_with_loss, tables, str(folder))
    assert not verdict["holds"]
    assert quantity in {row["quantity"] for row in verdict["rows"] if not row["holds"]}


def verified_in_time(place: TestPlace, tables: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """With updates that are shown at once, though the run file says that they are delayed."""
    from shoal.memory.streamed_state import DelayedUpdates

    stream = DelayedUpdates.stream

    def at_once(self: Any, parts: Any, state: Any) -> None:
        self._after = 1 << 30
        stream(self, parts, state)

    with patch.object(DelayedUpdates, "stream", at_once):
        return verified(place, tables, folder, False, STEPS)


def test_an_update_that_is_not_delayed_is_found(ranks, folder: Path) -> None:
    world, tables = PROVED["delayed updates"]
    verdict, *_ = ranks(world, verified_in_time, tables, str(folder))
    assert not verdict["holds"]
    assert {row["quantity"] for row in verdict["rows"] if not row["holds"]} == {"weight"}
