"""`shoal profile` names what was made slow, and the change that it advises removes it."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import msgspec
import pytest

from shoal.assembly.objects import UserObjects
from shoal.assembly.profiling import profile_rank
from shoal.config.load import apply
from shoal.launcher.environment import Place
from shoal.launcher.lab.network import RATES
from shoal.observe.profile.trace import trace
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile
from tests.assembly.slow_parts import kept_from_its_core
from tests.comm.hosts import on_host
from tests.ranks import TestPlace

SLOW_LINK = 5e6
"""Bytes a second between hosts: a gradient of 1 MB takes 200 ms."""
TABLES: dict[str, Any] = {
    "run": {"name": "slow", "steps": 50},
    "model": {"kind": "python", "build": "tests.assembly.slow_parts:model"},
    "data": {"kind": "python", "build": "tests.assembly.slow_parts:data"},
    "batch": {"global_samples": 512},
    "optimizer": {"kind": "sgd", "lr": 0.01},
}


def profiled(place: TestPlace, overrides: list[str], link: bool, stopped: int | None) -> dict[str, Any] | None:
    """The bottleneck and the trace at rank 0. `link`: every rank on a host of its own, behind a slow link."""
    os.environ["PLANTED_RANK"] = str(place.rank)
    run_file = run_file_of(apply(TABLES, overrides, RunFile), file="slow.toml")
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    environ = dict(os.environ)
    if link:
        rates = [[SLOW_LINK] * place.size] * place.size
        environ[RATES] = json.dumps({"hosts": list(range(place.size)), "bytes_s": rates})
    with (
        on_host(f"host-{place.rank}") if link else contextlib.nullcontext(),
        kept_from_its_core() if stopped == place.rank else contextlib.nullcontext(),
    ):
        found = profile_rank(run_file, here, UserObjects(), warmup=3, steps=4, environ=environ, store=place.store)
    if found is None:
        return None
    slow = found.bottleneck
    return {
        "kind": slow.kind,
        "rank": slow.rank,
        "share": slow.share,
        "sentence": slow.sentence,
        "change": slow.change,
        "operator": slow.operator,
        "step_s": found.ranks[0].split.step_s,
        "trace": trace(found.recordings),
    }


PLANTED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "data": (["data.arguments={read_s=0.001, rank=1}"], {}),
    "wire": ([], {"link": True}),
    "slow rank": ([], {"stopped": 1}),
    "operator": (["model.arguments={sorts=6}"], {}),
}
"""What makes the run slow: keys, and what the ranks do. Each is ten times what else a step takes."""


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    "kind",
    # Beside other programs every rank is kept from its core, and not the planted one alone.
    [pytest.param(kind, marks=pytest.mark.stress if kind == "slow rank" else ()) for kind in PLANTED],
)
def test_a_planted_bottleneck_is_named_and_the_change_removes_it(ranks, kind: str) -> None:
    """A slow loader on rank 1, a slow link, a rank kept from its core, an operator: named, with rank and operator; the
    keys that are advised, or where it is no key the cause taken away, make the step much shorter."""
    _named_and_removed(ranks, 2, kind)


@pytest.mark.stress
@pytest.mark.parametrize("kind", PLANTED)
def test_four_ranks(ranks, kind: str) -> None:
    """The same on four."""
    _named_and_removed(ranks, 4, kind)


def _named_and_removed(ranks: Any, world: int, kind: str) -> None:
    keys, planted = PLANTED[kind]
    slow = ranks(world, profiled, keys, planted.get("link", False), planted.get("stopped"))[0]
    assert slow["kind"] == kind, slow["sentence"]
    assert slow["share"] > 0.3, slow["sentence"]
    if kind in ("data", "slow rank"):
        assert slow["rank"] == 1, slow["sentence"]
    if kind == "operator":
        assert slow["operator"] == "aten::sort"
        assert "slow_parts.py" in slow["sentence"]
    if kind in ("data", "wire"):
        assert slow["change"]
        better = ranks(world, profiled, [*keys, *slow["change"]], planted.get("link", False), None)[0]
    else:
        better = ranks(world, profiled, [], False, None)[0]
    assert better["step_s"] < 0.7 * slow["step_s"], (slow["sentence"], better["sentence"])
    _arrows_join_ranks(slow["trace"], world)


def _arrows_join_ranks(trace: dict[str, Any], world: int) -> None:
    """Every arrow has both ends, on two ranks, within a collective of one key."""
    begins = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "s"}
    ends = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) >= 4 * (world - 1)
    calls = [event for event in trace["traceEvents"] if event.get("cat") == "collective" and event["ph"] == "X"]
    for name, begin in begins.items():
        end = ends[name]
        assert begin["pid"] != end["pid"]
        around = [
            {
                call["args"]["key"]
                for call in calls
                if call["pid"] == one["pid"]
                and call["tid"] == one["tid"]
                and call["ts"] <= one["ts"] <= call["ts"] + call["dur"] + 0.002
            }
            for one in (begin, end)
        ]
        assert around[0] & around[1], (begin, end)
