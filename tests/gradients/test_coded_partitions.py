"""Partitions that leave by priority, each a coded sum with a residual of its own. Ranks are threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.codec.config import CodecConfig
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded import Coded, CodedExchanges
from shoal.comm.exchanges.exchange import Segment, segments_within
from shoal.comm.ledger import Ledger
from shoal.config.check import implementation_of
from shoal.gradients.config import GradientsConfig
from shoal.gradients.priority import PriorityGradients
from shoal.gradients.residuals import PREFIX, ResidualSection
from shoal.state import owned_whole, targets_of
from tests.codec.every import CONFIGS
from tests.comm.local import local_group
from tests.gradients.buckets import replicated
from tests.waiting import HANG_S

SHAPES = {"a": (7, 9), "b": (5,), "c": (3, 4, 5), "d": ()}
PARTITION_BYTES, CREDIT_BYTES = 200, 450
"""25 float64 numbers: `a` and `c` are cut inside rows, into three partitions each; two are on the wire at once."""
STEPS = 6
"""The first three are rehearsals, which send everything after the backward."""
FLOAT64 = 1e-11
"""Sums of a few float64 numbers of which the largest is about 10."""
FLOAT32 = 1e-5
"""The same, of payloads that are summed on the way: in float32, as an all-reduce of float32 does."""

with_feedback = pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if config.feedback and name != "dgc"]
)
"""Deep Gradient Compression sends velocities, through an exchange of its own."""


class Times(nn.Module):
    """A parameter, whose gradient is what it is called with."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(shape, dtype=torch.float64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


class Rank:
    """The gradients of one rank, and the section of their residuals."""

    def __init__(self, group: Collective, later: Collective, name: str) -> None:
        self.group = group
        config: CodecConfig = CONFIGS[name]
        self.exchanges = CodedExchanges(
            implementation_of(config)(config), feedback=config.feedback, seed=0, later=later
        )
        self.model = nn.ModuleDict({key: Times(shape) for key, shape in SHAPES.items()})
        trained = replicated(self.model.named_parameters(), rank=group.rank, size=group.size)
        self.gradients = PriorityGradients(
            GradientsConfig(schedule="priority", partition_bytes=PARTITION_BYTES, credit_bytes=CREDIT_BYTES),
            trained,
            model=self.model,
            lane=group,
            ledger=Ledger(),
            partition=self.exchanges.partition,
            whole=config.codes_matrices,
        )
        owned = [owned_whole(t) for t in trained]
        self.section = ResidualSection(name, self.exchanges.made, owned, feedback=config.feedback)
        self.summed: dict[int, Tensor] = {}
        self.gradients.on_arrival(self._note)

    def _note(self, part: int, norm: Tensor) -> None:
        for parameter in self.gradients.parts[part]:
            assert parameter.grad is not None
            self.summed[id(parameter)] = parameter.grad.clone()

    def step(self, step: int, *, spoiled: bool = False) -> dict[str, Tensor]:
        """Sums the numbers of `given`; the results. `spoiled`: one is not finite, and no update follows."""
        self.gradients.start()
        numbers = given_by(self.group.rank, step)
        if spoiled and self.group.rank == 0:
            numbers["c"][2, 3, 4] = torch.nan
        with self.gradients.backward(last=True):
            total = sum(self.model[key](numbers[key]) for key in SHAPES)
            total.backward()  # type: ignore[union-attr]
        self.gradients.release(commit=not spoiled)
        if self.gradients.rehearses:
            self.gradients.reduce()
        self.gradients.settle()
        return {key: self.summed[id(self.model[key].weight)] for key in SHAPES} if not spoiled else {}

    def saved(self) -> dict[str, Tensor]:
        """Every tensor of the section, put together from its boxes; what none of them covers is NaN."""
        found: dict[str, Tensor] = {}
        for name, held in self.section.tensors().items():
            for target in targets_of(held):
                whole = found.setdefault(name, torch.full(target.global_shape, torch.nan, dtype=target.tensor.dtype))
                assert whole[target.box.slices].isnan().all(), "no number is there twice"
                whole[target.box.slices] = target.tensor
        return found

    def load(self, saved: Mapping[str, Tensor], facts: dict) -> None:
        """As resuming does: facts, then tensors."""
        self.section.load(facts)
        for name, held in self.section.targets({name: tensor.dtype for name, tensor in saved.items()}).items():
            for target in targets_of(held):
                target.tensor.copy_(saved[name][target.box.slices])


def given_by(rank: int, step: int) -> dict[str, Tensor]:
    """This rank's gradients of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {key: torch.randn(shape, generator=generator).double() for key, shape in SHAPES.items()}


def on_ranks(size: int, name: str, work: Callable[[Rank], object]) -> list:
    """What `work` returned on each of `size` threads."""
    found: list = [None] * size
    groups, later = local_group(size, timeout_s=HANG_S), local_group(size, timeout_s=HANG_S)

    def run(number: int) -> None:
        rank = Rank(groups[number], later[number], name)
        with closing(rank.gradients):
            found[number] = work(rank)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in found), "a rank failed"
    return found


def unsent(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum over sources of every parameter's residual."""
    found: dict[str, Tensor] = {}
    for key, value in saved.items():
        if key.startswith(PREFIX):
            parameter = key.removeprefix(PREFIX).partition("/")[2].removesuffix(".weight")
            found[parameter] = found[parameter] + value if parameter in found else value.clone()
    return found


def merged(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for own in parts for name, tensor in own.items()}


@with_feedback
@pytest.mark.parametrize("size", [2, 4])
def test_nothing_is_lost(name: str, size: int) -> None:
    """In every step, of every number: results + new residuals == gradients + old residuals; all ranks have the same
    bits.
    """

    def work(rank: Rank) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        return [(rank.step(step), rank.saved()) for step in range(STEPS)]

    ranks = on_ranks(size, name, work)
    before = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    tolerance = FLOAT32 if implementation_of(CONFIGS[name])(CONFIGS[name]).linear else FLOAT64
    for step in range(STEPS):
        after = unsent(merged([rank[step][1] for rank in ranks]))
        assert after.keys() == SHAPES.keys()
        for key in SHAPES:
            result = ranks[0][step][0][key]
            assert all(torch.equal(result, rank[step][0][key]) for rank in ranks)
            wanted = sum(given_by(number, step)[key] for number in range(size)) + before[key]
            assert torch.allclose(result + after[key], wanted, rtol=0, atol=tolerance), key
        before = after
    assert any(value.any() for value in before.values())


@with_feedback
def test_a_step_without_an_update_is_forgotten(name: str) -> None:
    """The residuals are those before it, and the next step sends what it would have sent."""

    def work(rank: Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rank.step(0)
        before = rank.saved()
        rank.step(1, spoiled=True)
        return before, rank.saved()

    for before, after in on_ranks(2, name, work):
        assert before.keys() == after.keys()
        for key, value in before.items():
            if key.startswith(PREFIX):
                assert value.isfinite().all()
                assert torch.equal(value, after[key])


@pytest.mark.parametrize("name", ["top_k", "int4 stochastic", "power_sgd", "random_k"])
def test_a_resumed_run_sends_the_same_bits(name: str) -> None:
    """Though it rehearses once more, so that partitions leave in another order."""

    def straight(rank: Rank) -> tuple[dict[str, Tensor], dict, list[dict[str, Tensor]]]:
        for step in range(4):
            rank.step(step)
        saved, facts = rank.saved(), rank.section.facts()
        return saved, facts, [rank.step(step) for step in range(4, 8)]

    ranks = on_ranks(3, name, straight)
    saved, facts = merged([rank[0] for rank in ranks]), ranks[0][1]

    def resumed(rank: Rank) -> list[dict[str, Tensor]]:
        rank.load(saved, facts)
        return [rank.step(step) for step in range(4, 8)]

    for again, (_, _, wanted) in zip(on_ranks(3, name, resumed), ranks, strict=True):
        for one, other in zip(again, wanted, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in SHAPES)


@pytest.mark.parametrize("name", ["top_k", "int4", "power_sgd"])
@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 3), (2, 4)])
def test_the_sum_over_ranks_is_kept(name: str, before: int, after: int) -> None:
    """Of every number of every parameter, whatever the number of ranks becomes."""

    def trained(rank: Rank) -> tuple[dict[str, Tensor], dict]:
        for step in range(3):
            rank.step(step)
        return rank.saved(), rank.section.facts()

    ranks = on_ranks(before, name, trained)
    saved = merged([rank[0] for rank in ranks])

    def loaded(rank: Rank) -> dict[str, Tensor]:
        rank.load(saved, ranks[0][1])
        return rank.saved()

    wanted, found = unsent(saved), unsent(merged(on_ranks(after, name, loaded)))
    assert wanted.keys() == found.keys() == SHAPES.keys()
    for key, total in wanted.items():
        assert torch.allclose(found[key], total, rtol=0, atol=FLOAT64), key


def test_a_matrix_is_one_partition_for_a_codec_of_matrices() -> None:
    """However small partitions are, it is not cut; for others a partition has at most its bytes."""

    def cuts(rank: Rank) -> list[tuple[int, list[tuple[str, tuple[int, ...], int]]]]:
        made = [one for one in rank.exchanges.made if isinstance(one, Coded)]
        return [(one.result.nbytes, [(s.name, s.shape, s.skipped) for s in one.segments]) for one in made]

    whole = {segment for _, segments in on_ranks(2, "power_sgd", cuts)[0] for segment in segments}
    assert whole == {(f"{key}.weight", shape, 0) for key, shape in SHAPES.items()}
    cut = on_ranks(2, "top_k", cuts)[0]
    assert all(nbytes <= PARTITION_BYTES for nbytes, _ in cut)
    assert sum(name == "a.weight" for _, segments in cut for name, _, _ in segments) >= 3


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 3))
def test_cuts_hold_every_number_once(lengths: list[int], longest: int, gap: int) -> None:
    """Segments of parts of a buffer, each with how many numbers of its parameter come before it."""
    segments, at = [], 0
    for number, length in enumerate(lengths):
        segments.append(Segment(f"p{number}", at, (length,)))
        at += length + gap
    found: dict[str, list[tuple[int, int]]] = {}
    for start in range(0, at, longest):
        part = slice(start, min(start + longest, at))
        for segment in segments_within(segments, part):
            assert segment.start >= 0
            assert segment.slice.stop <= part.stop - part.start
            home = segments[int(segment.name[1:])]
            assert start + segment.start == home.start + segment.skipped
            found.setdefault(segment.name, []).append((segment.skipped, segment.numel))
    for segment in segments:
        runs = found.get(segment.name, [])
        assert sum(numel for _, numel in runs) == segment.numel
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(runs))
