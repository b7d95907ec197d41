"""What error feedback keeps, when it is saved by some ranks and loaded by others. Ranks are threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.codec.codec import Codec
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded import CodedExchanges
from shoal.errors import UsageError
from shoal.gradients.bucket import Bucket, parts_by_size
from shoal.gradients.replicated import replicated_bucket
from shoal.gradients.residuals import PREFIX, VELOCITY, ResidualSection, as_own, is_own
from shoal.state import owned_whole, targets_of
from tests.codec.every import codec_of
from tests.comm.exchanges.test_coded import on_ranks
from tests.gradients.buckets import replicated

SHAPES = {"a": (7, 9), "b": (5,), "c": (3, 4, 5)}
ROUNDING = 1e-5
"""Float32 sums of a few numbers of about 1."""


class Rank:
    """The buckets of one rank, and the section of their residuals."""

    def __init__(self, group: Collective, codec: Codec, *, feedback: bool = True, kind: str = "top_k") -> None:
        self.group, self.exchanges = group, CodedExchanges(codec, feedback=feedback, seed=0)
        parameters = [(name, Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
        trained = replicated(parameters, rank=group.rank, size=group.size)
        parts = parts_by_size(trained, lambda h: h.sums, bytes_limit=200, first_bytes=200, divided=False)
        self.buckets: list[Bucket] = [replicated_bucket(trained, part, group, self.exchanges) for part in parts]
        self.section = ResidualSection(kind, self.exchanges.made, [owned_whole(t) for t in trained], feedback=feedback)

    def step(self, seed: int) -> float:
        """Sums random gradients. The sum of what this rank gives."""
        given = 0.0
        generator = torch.Generator().manual_seed(100 * seed + self.group.rank)
        for bucket in self.buckets:
            bucket.start()
            for index in bucket.indices:
                bucket.slice(index).copy_(torch.randn(bucket.slice(index).shape, generator=generator))
                given += float(bucket.slice(index).sum())
            bucket.send()
        for bucket in self.buckets:
            bucket.settle()
        for bucket in self.buckets:
            bucket.wait()
            bucket.commit()
        return given

    def saved(self) -> dict[str, Tensor]:
        """What is here of every tensor, whole as these ranks have it."""
        found = {name: targets_of(held) for name, held in self.section.tensors().items()}
        assert all(len(targets) == 1 and targets[0].box.shape == targets[0].global_shape for targets in found.values())
        return {name: targets[0].tensor.clone() for name, targets in found.items()}

    def load(self, saved: dict[str, Tensor], facts: dict) -> None:
        """As resuming does: facts, then tensors."""
        self.section.load(facts)
        dtypes = {name: tensor.dtype for name, tensor in saved.items()}
        targets = self.section.targets(dtypes)
        assert {*targets, *self.section.elsewhere(dtypes)} == {*saved}
        for name, held in targets.items():
            for target in targets_of(held):
                target.tensor.copy_(saved[name][target.box.slices])


def trained_ranks(size: int, codec: str) -> tuple[dict[str, Tensor], dict]:
    """The checkpoint of ranks that have taken three steps."""

    def work(group: Collective) -> Rank:
        rank = Rank(group, codec_of(codec))
        for seed in range(3):
            rank.step(seed)
        return rank

    ranks = on_ranks(size, work)
    merged = {name: tensor for rank in ranks for name, tensor in rank.saved().items()}
    return merged, ranks[0].section.facts()


def sums(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum over sources of every parameter's residual."""
    found: dict[str, Tensor] = {}
    for key, value in saved.items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX).partition("/")[2]
            found[name] = found[name] + value if name in found else value.clone()
    return found


@pytest.mark.parametrize("codec", ["top_k", "int4", "power_sgd"])
@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 3), (4, 2), (2, 4), (3, 2)])
def test_the_sum_over_ranks_is_kept(codec: str, before: int, after: int) -> None:
    """Of every parameter, whatever the number of ranks becomes; with the same ranks, every rank has its own bits."""
    saved, facts = trained_ranks(before, codec)

    def work(group: Collective) -> dict[str, Tensor]:
        rank = Rank(group, codec_of(codec))
        rank.load(saved, facts)
        assert rank.section.facts()["rounds"] == 3
        return rank.saved()

    loaded = {name: tensor for own in on_ranks(after, work) for name, tensor in own.items()}
    wanted, found = sums(saved), sums(loaded)
    assert wanted.keys() == found.keys() == SHAPES.keys()
    assert wanted["a"].any()
    for name, total in wanted.items():
        assert torch.allclose(found[name], total, rtol=0, atol=ROUNDING), name
    if before == after:
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)


@pytest.mark.parametrize("leavers", [{1}, {0}, {0, 2}, set(), {0, 1, 2, 3}])
def test_what_leavers_have_not_sent_is_sent_by_the_first_that_stays(leavers: set[int]) -> None:
    """The sum over all ranks lies with those that stay; where none leaves, or none stays, each keeps its own."""

    def work(group: Collective) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rank = Rank(group, codec_of("top_k"))
        for seed in range(3):
            rank.step(seed)
        before = rank.saved()
        rank.exchanges.hand_over(group, leaving=group.rank in leavers)
        return before, rank.saved()

    found = on_ranks(4, work)
    before = {name: tensor for own, _ in found for name, tensor in own.items()}
    after = {name: tensor for _, own in found for name, tensor in own.items()}
    stays = sorted({0, 1, 2, 3} - leavers)
    for name in SHAPES:
        kept = {rank: after[f"{PREFIX}{rank}/{name}"] for rank in range(4)}
        assert torch.allclose(sum(kept.values()), sums(before)[name], rtol=0, atol=ROUNDING)  # type: ignore[arg-type]
        for rank in range(4):
            if not stays or not leavers or rank in stays[1:]:
                assert torch.equal(kept[rank], before[f"{PREFIX}{rank}/{name}"])
            elif rank in leavers:
                assert not kept[rank].any()


def test_what_was_handed_over_is_sent() -> None:
    """By the rank that is left: over all steps, what was summed is what was given less what is still unsent."""

    def work(group: Collective) -> tuple[float, float, float]:
        rank = Rank(group, codec_of("top_k"))
        given = summed = 0.0
        for seed in range(4):
            given += rank.step(seed)
            summed += sum(float(bucket.exchange.result.sum()) for bucket in rank.buckets)
            rank.exchanges.hand_over(group, leaving=seed == 1 and group.rank == 1)
        return summed, given, sum(float(tensor.sum()) for tensor in rank.saved().values())

    (summed, *first), (_, *second) = on_ranks(2, work)
    given, unsent = (one + other for one, other in zip(first, second, strict=True))
    assert summed == pytest.approx(given - unsent, abs=100 * ROUNDING)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rank_that_gets_another_place_keeps_its_own(place: int) -> None:
    """Bit by bit, and nothing of others: neither what was theirs, nor a newcomer anything."""

    def first(group: Collective) -> tuple[dict[str, Tensor], dict]:
        rank = Rank(group, codec_of("top_k"))
        rank.step(0)
        return {as_own(name): tensor for name, tensor in rank.saved().items() if is_own(name)}, rank.section.facts()

    saved, facts = on_ranks(4, first)[3]
    assert saved.keys() == {f"{PREFIX}own/{name}" for name in SHAPES}

    def work(group: Collective) -> dict[str, Tensor]:
        rank = Rank(group, codec_of("top_k"))
        rank.load(saved if group.rank == place else {}, facts)
        return {as_own(name): tensor for name, tensor in rank.saved().items()}

    for rank, found in enumerate(on_ranks(3, work)):
        assert found.keys() == saved.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, saved[name]) if rank == place else not tensor.any()


def test_only_residuals_and_velocities_are_a_ranks_own() -> None:
    """What a codec has learned is the same on all ranks, and a name that only looks alike is another tensor's."""
    assert as_own(f"{PREFIX}12/a.b") == f"{PREFIX}own/a.b"
    assert as_own(f"{VELOCITY}0/a") == f"{VELOCITY}own/a"
    for name in ("codec/state/a", "model/codec/residual/0/a", "optimizer/momentum/a"):
        assert not is_own(name)
        assert as_own(name) == name


class Undecided:
    """A choice of codecs that has not chosen any yet, as that of `kind = "auto"` at the start of a run."""

    codec = None

    def add(self, numel: int, segments: object) -> int:
        return 0

    def begin(self) -> None:
        """There is nothing to measure."""

    def sent(self) -> None:
        """Nor here."""


def test_a_run_that_has_yet_to_choose_a_codec_takes_residuals_over() -> None:
    """What was not sent before is sent with the next sum."""
    saved, facts = trained_ranks(2, "top_k")

    def work(group: Collective) -> dict[str, Tensor]:
        rank = Rank(group, lambda group: Undecided())  # type: ignore[arg-type]
        rank.load(saved, facts)
        return rank.saved()

    loaded = {name: tensor for own in on_ranks(2, work) for name, tensor in own.items()}
    wanted, found = sums(saved), sums(loaded)
    assert wanted.keys() == found.keys()
    assert wanted["a"].any()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_source_that_nobody_takes_over_shows() -> None:
    """The comparison has teeth."""
    saved, _ = trained_ranks(4, "top_k")
    wanted = sums(saved)
    found = sums({name: tensor for name, tensor in saved.items() if not name.startswith(f"{PREFIX}3/")})
    assert not torch.allclose(found["a"], wanted["a"], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("feedback", [False, None])
def test_residuals_are_not_dropped_in_silence(feedback: bool | None) -> None:
    """Neither by a codec without error feedback nor by a run without a codec; the sentence names the codec."""
    _, facts = trained_ranks(2, "top_k")

    def work(group: Collective) -> str:
        codec = codec_of("sign")
        section = (
            ResidualSection("none", [], [], feedback=False)
            if feedback is None
            else Rank(group, codec, feedback=False).section
        )
        with pytest.raises(UsageError, match="top_k") as raised:
            section.load(facts)
        return str(raised.value)

    assert on_ranks(2, work)[0].count("codec.") >= 3


def test_a_run_without_a_codec_writes_nothing() -> None:
    """Its checkpoints are those of before."""
    section = ResidualSection("none", [], [], feedback=False)
    assert (section.tensors(), section.facts(), section.targets({}), section.elsewhere({})) == ({}, {}, {}, set())
