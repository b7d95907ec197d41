"""`sync.kind = "streaming"`: DiLoCo by fragments, behind further steps."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from shoal.sync.config import StreamingConfig
from shoal.sync.streaming import fragments_of
from tests.sync.steps import ADAM, STEPS, SUM_ORDER, Tables, gap, mean_of, train
from tests.verification.layouts import corpus

LOCAL: Tables = {"kind": "local", "period": 4}
STREAMING: Tables = {"kind": "streaming", "period": 4, "fragments": 2, "delay": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streaming")
    corpus(folder)
    return folder


def test_one_fragment_without_delay_and_mixing_is_diloco(ranks, folder: Path) -> None:
    """The same parameters and outer momentum after two periods."""
    plain = {"kind": "streaming", "period": 4, "fragments": 1, "delay": 0, "mixing": 0.0}
    streaming, *_ = ranks(2, train, ADAM | {"sync": plain}, str(folder), 0, 8)
    local, *_ = ranks(2, train, ADAM | {"sync": LOCAL}, str(folder), 0, 8)
    assert gap(streaming.weights, local.weights) < SUM_ORDER
    momenta = [
        {name: tensor for name, tensor in one.state.items() if name.startswith("sync/momentum/")}
        for one in (streaming, local)
    ]
    assert gap(*momenta) < SUM_ORDER


def test_the_run_ends_with_the_average_of_the_replicas(ranks, folder: Path) -> None:
    """Though a period is not over, and a fragment is on the wire."""
    tables = ADAM | {"sync": STREAMING | {"period": 8, "fragments": 2, "delay": 3}}
    found, *_ = ranks(2, train, tables, str(folder))
    assert found.agreed == [step in (8, STEPS) for step in range(1, STEPS + 1)]
    assert gap(found.weights, mean_of([found.own(0), found.own(1)])) < SUM_ORDER


def test_fragments_leave_one_after_the_other(ranks, folder: Path) -> None:
    """As many bytes in a period as DiLoCo, and in no step more than about a fragment."""
    sizes = {"period": 8, "fragments": 8, "delay": 0}
    streaming, *_ = ranks(2, train, ADAM | {"sync": STREAMING | sizes}, str(folder), 0, 8)
    local, *_ = ranks(2, train, ADAM | {"sync": LOCAL | {"period": 8}}, str(folder), 0, 8)
    assert sum(streaming.sent) == pytest.approx(sum(local.sent), rel=0.02)
    assert 4 * max(streaming.sent) <= max(local.sent)


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("layout", [{"replicate": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_a_run_goes_on_bitwise(ranks, folder: Path, layout: Tables) -> None:
    """What is shared, the outer momentum, each replica's parameters and its moments."""
    size, name = 2 * layout.get("shard", 1), f"streaming-{len(layout)}"
    tables = ADAM | {"layout": layout, "sync": STREAMING, "batch": {"global_samples": 2 * size}}
    whole, *_ = ranks(size, train, tables, str(folder))
    ranks(size, train, tables, str(folder), 0, 8, name)
    resumed, *_ = ranks(size, train, tables, str(folder), 8, STEPS, name)
    assert {"sync/replica-1/x/head.weight", "sync/momentum/head.weight"} <= whole.state.keys()
    assert resumed.state.keys() == whole.state.keys()
    assert all(torch.equal(tensor, whole.state[key]) for key, tensor in resumed.state.items())


def test_fragments_are_about_equally_large() -> None:
    """Largest first, each to the smallest; every tensor in one of them."""
    owned: list[Any] = [SimpleNamespace(parameter=torch.zeros(size)) for size in (7, 1, 6, 3, 5, 2)]
    found = fragments_of(owned, 3)
    assert sorted(sum(one.parameter.numel() for one in part) for part in found) == [8, 8, 8]
    assert sum(len(part) for part in found) == len(owned)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"period": 4, "fragments": 8, "delay": 0}, "fragments = 8 with period = 4"),
        ({"period": 12, "fragments": 4, "delay": 3}, "set delay to 2 or less"),
    ],
)
def test_fragments_that_would_meet_are_refused(keys: Tables, words: str) -> None:
    """When the table is read."""
    with pytest.raises(msgspec.ValidationError, match=re.escape(words)):
        msgspec.convert({"kind": "streaming"} | keys, StreamingConfig)
