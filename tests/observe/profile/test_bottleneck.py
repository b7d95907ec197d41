"""The sentence on the bottleneck, from figures that are written down."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.observe.profile.bottleneck import Measured, Setup, bottleneck
from shoal.observe.profile.recording import Exposed
from shoal.observe.profile.split import Operator, TimeSplit


def rank(number: int = 0, **seconds: Any) -> Measured:
    """A rank whose step takes 1 s: what is not given is compute, in products."""
    given = {name: seconds.get(name, 0.0) for name in ("data_s", "host_s", "wire_s")}
    for_rank = seconds.get("for_rank", {})
    communication_s = given["wire_s"] + sum(for_rank.values())
    compute_s = 1.0 - given["data_s"] - given["host_s"] - communication_s
    operators = seconds.get("operators", [Operator("aten::mm", compute_s, 10)])
    return Measured(
        TimeSplit(number, 1.0, given["data_s"], communication_s, compute_s, given["host_s"], seconds.get("cpu", 1.0),
              seconds.get("data_cpu", 0.0)),
        Exposed(number, given["wire_s"], 0.0, for_rank, {"all_reduce": given["wire_s"]}, 1e6),
        operators,
        seconds.get("sources", {}),
    )  # fmt: skip


def rounds_of(*works: float) -> list[list[Measured]]:
    """Two ranks, of which rank 1 works so many times as long as rank 0 in each round, and rank 0 waits for it."""
    return [[rank(0, for_rank={1: 1 - 1 / one} if one > 1 else {}), rank(1)] for one in works]


def test_a_slow_rank_of_which_noise_is_enough_is_not_named() -> None:
    """Rank 1 works 1.4 times as long in the mean of five rounds, now twice as long and now as long as rank 0: nothing
    stands out. Where it does so in every round, it is named, and where its share lies is told."""
    mean = [rank(0, for_rank={1: 1 - 1 / 1.4}), rank(1)]
    noise = bottleneck(mean, Setup(), rounds=rounds_of(2.2, 1.0, 1.0, 1.9, 1.0))
    assert noise.kind == "nothing"
    assert noise.sentence.startswith("nothing stands out: the most likely is waiting for a slow rank on rank 1")
    named = bottleneck(mean, Setup(), rounds=rounds_of(1.41, 1.4, 1.38, 1.42, 1.39))
    assert (named.kind, named.rank) == ("slow rank", 1)
    assert named.interval is not None
    assert named.interval.low < named.share < named.interval.high
    once = bottleneck(mean, Setup(), rounds=rounds_of(1.4))
    assert "a single step is no evidence" in once.sentence


def test_a_step_that_computes_is_told_whatever_the_rounds() -> None:
    """Nothing is as large as what counts."""
    assert bottleneck([rank(), rank(1)], Setup(), rounds=rounds_of(1.0, 1.0)).kind == "compute"


def test_waiting_for_data_asks_for_readers_and_for_as_many_steps_read_ahead() -> None:
    """One reader of which a rank waits 0.6 of its time for data does 0.4 of what is needed: three do it all."""
    found = bottleneck([rank(0, for_rank={1: 0.5}), rank(1, data_s=0.6)], Setup(readers=1, prefetch_steps=2))
    assert (found.kind, found.rank) == ("data", 1)
    assert found.change == ("data.readers=3", "data.prefetch_steps=3")
    assert found.sentence == "rank 1 waits 60 % of its step for data: data.readers=3 data.prefetch_steps=3"


@pytest.mark.parametrize(
    ("setup", "change"),
    [
        (Setup(cores=4), ('data.reader_kind="processes"', "data.readers=3", "data.prefetch_steps=3")),
        (Setup(cores=1), ('data.reader_kind="processes"',)),
        (Setup(cores=2, readers=2, reader_kind="processes"), ()),
    ],
)
def test_reading_that_computes_gets_processes_and_no_more_than_the_cores(setup: Setup, change: tuple[str, ...]) -> None:
    """Threads of one interpreter compute one at a time; with all cores at work there is no key left."""
    found = bottleneck([rank(data_s=0.6, data_cpu=1.0)], setup)
    assert found.change == change
    assert ("prepare the data once" in found.sentence) == (not change)


@pytest.mark.parametrize("helps", [True, False])
def test_a_slow_wire_asks_for_a_codec_where_one_may_be_set(helps: bool) -> None:
    """Else for another layout."""
    found = bottleneck([rank(0, wire_s=0.5), rank(1, wire_s=0.4)], Setup(codec_helps=helps))
    assert (found.kind, found.rank) == ("wire", 0)
    assert found.change == (('codec.kind="blockwise"',) if helps else ())
    assert "1 MB sent in a step, 2 MB/s" in found.sentence


def test_a_rank_that_is_kept_from_its_cores_is_told_from_one_that_does_more() -> None:
    """Rank 1 works 1 s where rank 0 works 0.4 s and waits for it: by its share of a core, or by an operator."""
    usual = rank(0, for_rank={1: 0.6}, operators=[Operator("aten::mm", 0.4, 10)])
    kept = bottleneck([usual, rank(1, cpu=0.4)], Setup())
    assert (kept.kind, kept.rank, kept.operator) == ("slow rank", 1, None)
    assert "works 2.5 times as long as the others, which wait 60 % of their step for it" in kept.sentence
    assert "had a core 40 % of that time, theirs 100 %" in kept.sentence
    more = [Operator("aten::sort", 0.6, 1), Operator("aten::mm", 0.4, 10)]
    found = bottleneck([usual, rank(1, operators=more, sources={"aten::sort": "m.py(3): forward"})], Setup())
    assert (found.kind, found.operator) == ("slow rank", "aten::sort")
    assert "aten::sort (called at m.py(3): forward) takes the difference" in found.sentence
    slower = bottleneck([usual, rank(1, operators=[Operator("aten::mm", 0.7, 10)])], Setup())
    assert "all it does is slower: compare its host" in slower.sentence


def test_an_operator_is_named_unless_it_is_what_models_are_made_of() -> None:
    """Half of the step in a sort is a bottleneck, half of it in products is not."""
    sorting = [rank(operators=[Operator("aten::mm", 0.5, 1), Operator("aten::sort", 0.5, 1)])]
    assert bottleneck(sorting, Setup()).operator == "aten::sort"
    found = bottleneck([rank()], Setup())
    assert (found.kind, found.operator) == ("compute", "aten::mm")


def test_python_between_operators_asks_to_compile_where_that_is_allowed() -> None:
    """Elsewhere for larger microbatches alone."""
    assert bottleneck([rank(host_s=0.5)], Setup(may_compile=True)).change == ("run.compile=true",)
    assert bottleneck([rank(host_s=0.5)], Setup()).change == ()
