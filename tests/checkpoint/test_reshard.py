"""Saved under any layout, loaded under any other: ranks are threads, layouts are random."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.commit import checkpoints, read_manifest
from shoal.checkpoint.load import read_all, read_into
from shoal.checkpoint.save import Saver
from shoal.errors import UsageError
from shoal.state import Target
from shoal.topology.holding import Box
from tests.checkpoint.cuts import held, of_rank, shapes, targets
from tests.checkpoint.states import OBJECT_BYTES, on_ranks, same, saver_for, state_of
from tests.waiting import HANG_S

WORLD = 4
few = settings(deadline=None, max_examples=30)
"""Each example writes files from four threads."""


class Ranks:
    """The savers of `world` ranks, and what they report."""

    def __init__(self, directory, world=WORLD, **options: Any) -> None:
        self.directory, self.world = directory, world
        self.exchange = options.pop("exchange", None) or LocalExchange()
        options = {"split": True} | options
        shared = {"world_size": world, "exchange": self.exchange} | options
        self.savers: list[Saver] = [saver_for(directory, rank=rank, **shared) for rank in range(world)]

    def save(self, step, tensors_of):
        """All ranks save what `tensors_of(rank)` gives; the reports, and the manifest of the newest checkpoint."""
        reports: dict[int, Any] = {}

        def work(rank: int) -> None:
            self.savers[rank].save(step, tensors_of(rank), {}, layout={})
            (reports[rank],) = self.savers[rank].wait(HANG_S)

        on_ranks(self.world, work)
        found = checkpoints(self.directory)
        return reports, read_manifest(found[0]) if found else None


def numbers(shape, dtype=torch.float32):
    """Elements that all differ."""
    return torch.arange(prod(shape)).view(shape).to(dtype)


TENSORS = {"model/a": torch.float32, "model/b": torch.bfloat16, "optimizer/exp_avg/a": torch.float64}


@pytest.mark.slow
@few
@given(st.data(), st.lists(shapes, min_size=3, max_size=3), st.integers(16, 200))
def test_any_layout_is_loaded_under_any_other_bit_by_bit(tmp_path_factory, data, drawn, object_bytes):
    """Splits along dims, flat runs, replicas and stages, nested and uneven: equal elements in every rank's memory."""
    tensors = {name: numbers(shape, dtype) for (name, dtype), shape in zip(TENSORS.items(), drawn, strict=True)}
    tensors["optimizer/step/a"] = torch.tensor(3.0)
    first, second = ({n: data.draw(held(tuple(t.shape), range(WORLD))) for n, t in tensors.items()} for _ in "ab")
    directory = tmp_path_factory.mktemp("reshard")
    compress = data.draw(st.sampled_from(["none", "planes", "deltas"]))
    ranks = Ranks(directory, object_bytes=object_bytes, compress=compress)
    if compress == "deltas":
        earlier = {name: tensor * 3 for name, tensor in tensors.items()}
        ranks.save(1, lambda rank: of_rank(rank, earlier, first))
    reports, manifest = ranks.save(2, lambda rank: of_rank(rank, tensors, first))
    assert manifest is not None, reports[0].error
    assert all(report.committed for report in reports.values())
    assert same(read_all(manifest, directory), tensors)
    for rank in range(WORLD):
        into, want = of_rank(rank, tensors, second, empty=True), of_rank(rank, tensors, second)
        read_into(manifest, directory, into, elsewhere=tensors)
        for name, parts in want.items():
            assert all(torch.equal(part.tensor, got.tensor) for part, got in zip(parts, into[name], strict=True))


def test_what_all_ranks_hold_is_saved_as_one_rank_saves_it(tmp_path):
    """Replicas of a split job write the very objects of a job of one rank, and share the work."""
    reports, many = Ranks(tmp_path / "many", keep=1).save(1, lambda rank: state_of(1))
    saver = saver_for(tmp_path / "one")
    saver.save(1, state_of(1), {}, layout={})
    assert saver.wait()[0].bytes_written == reports[0].bytes_written
    one = read_manifest(checkpoints(tmp_path / "one")[0])
    assert many is not None
    assert (many.tensors, many.objects) == (one.tensors, one.objects)


def test_objects_are_those_that_earlier_versions_wrote(tmp_path):
    """The cut of whole tensors is part of the format: what a run wrote before is found again and not written twice."""
    state = {
        "model/embed": numbers((70, 41)),
        "model/bias": torch.arange(41).to(torch.bfloat16),
        "model/tall": numbers((3, 2, 900), torch.int64),
        "model/mask": torch.arange(5) % 2 == 0,
        "model/empty": torch.empty(0, 3),
        "optimizer/step": torch.tensor(3.0),
        "optimizer/moment": numbers((70, 41), torch.float64),
    }
    _, manifest = Ranks(tmp_path, world=1, split=False).save(1, lambda rank: state)
    assert manifest is not None
    content = msgspec.json.encode([manifest.tensors, manifest.objects], order="deterministic")
    assert len(manifest.objects) == 21
    assert blake3(content).hexdigest()[:16] == "ea928347f963f312"


def test_each_rank_writes_what_it_has_and_shares_are_level(tmp_path):
    """Slices are written where they are; what all have is divided."""
    written = [0] * WORLD
    big = numbers((64, 256))

    def tensors_of(rank):
        mine = [Box((16 * rank, 0), (16, 256))]
        return {"model/split": targets(big + 0.5, mine), "model/whole": big}

    def count(rank):
        def heard(label):
            written[rank] += label == "object/write.after"

        return heard

    exchange = LocalExchange()
    savers = [
        saver_for(tmp_path, rank=rank, world_size=WORLD, exchange=exchange, split=True, on_point=count(rank))
        for rank in range(WORLD)
    ]

    def work(rank):
        savers[rank].save(1, tensors_of(rank), {}, layout={})
        assert savers[rank].wait(HANG_S)[0].committed

    on_ranks(WORLD, work)
    assert max(written) - min(written) <= 1
    assert sum(written) * OBJECT_BYTES >= 2 * big.numel() * 4


REFUSED = {
    "gap": ({0: [Box((0,), (4,))], 1: [Box((5,), (5,))]}, r"no rank holds \[4:5\] of model/w"),
    "overlap": ({0: [Box((0,), (6,))], 1: [Box((4,), (6,))]}, r"rank 0 holds \[0:6\] of model/w and rank 1"),
}


@pytest.mark.parametrize(("layout", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_part_without_a_holder_or_with_two_is_refused_on_every_rank(tmp_path, layout, said):
    """All ranks raise the same sentence, before anything is copied or written."""
    ranks = Ranks(tmp_path, world=2)
    tensor, heard = numbers((10,)), []

    def work(rank):
        with pytest.raises(UsageError, match=said) as caught:
            ranks.savers[rank].prepare(of_rank(rank, {"model/w": tensor}, {"model/w": layout}))
        heard.append(str(caught.value))

    on_ranks(2, work)
    assert len(set(heard)) == 1
    assert checkpoints(tmp_path) == []


def test_ranks_that_mean_different_tensors_by_one_name_are_refused(tmp_path):
    """The sentence names both ranks and what each holds."""
    ranks = Ranks(tmp_path, world=2)

    def work(rank):
        with pytest.raises(UsageError, match=r"rank 0 holds a part of model/w as float32 \[3\], and rank 1 as"):
            ranks.savers[rank].prepare({"model/w": torch.zeros(3 + rank)})

    on_ranks(2, work)


CONTRADICTIONS = {
    "beyond": ([Box((8,), (4,))], (10,), r"has the shape \[10\], and a rank holds \[8:12\]"),
    "twice": ([Box((0,), (6,)), Box((5,), (5,))], (10,), r"a part of model/w twice, in \[0:6\] and in \[5:10\]"),
}


@pytest.mark.parametrize(("boxes", "shape", "said"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_rank_that_contradicts_itself_is_refused(tmp_path, boxes, shape, said):
    """A part beyond the tensor, and an element held twice, are found before any other rank is asked."""
    parts = [Target(torch.zeros(box.shape), shape, box.offset) for box in boxes]
    with pytest.raises(UsageError, match=said):
        saver_for(tmp_path, split=True).save(1, {"model/w": parts}, {}, layout={})


def test_parts_need_a_saver_that_was_told_of_them(tmp_path):
    """Without `split` a part is taken for what every rank has, and the rest is missing."""
    with pytest.raises(UsageError, match=r"no rank holds \[5:10\] of model/w"):
        saver_for(tmp_path).save(1, {"model/w": targets(numbers((10,)), [Box((0,), (5,))])}, {}, layout={})


def test_tensors_that_appear_on_one_rank_alone_are_saved(tmp_path):
    """A stage without anything to train has no optimizer state when the others' appears; no rank waits in vain."""
    ranks = Ranks(tmp_path, world=2)
    weights = [{"model/a": numbers((50, 9))}, {"model/b": numbers((7,))}]
    ranks.save(1, lambda rank: weights[rank])
    moments = {"optimizer/exp_avg/b": numbers((7,)) + 1}
    reports, manifest = ranks.save(2, lambda rank: weights[rank] | (moments if rank else {}))
    assert all(report.committed for report in reports.values())
    assert manifest is not None
    assert same(read_all(manifest, tmp_path), weights[0] | weights[1] | moments)


class CountingExchange(LocalExchange):
    """Counts the bytes that were published."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def publish(self, key: str, value: bytes) -> None:
        self.nbytes += len(value) if "/share-" not in key and "/verdict" not in key else 0
        super().publish(key, value)


def test_what_did_not_change_is_agreed_upon_by_a_hash(tmp_path):
    """After the first save, ranks exchange a hash and a length each, however many tensors there are."""
    ranks = Ranks(tmp_path, exchange=CountingExchange())
    tensors = {f"model/{n}": numbers((n,)) for n in range(100)}
    ranks.save(1, lambda rank: tensors)
    before = ranks.exchange.nbytes
    ranks.save(2, lambda rank: tensors)
    assert 64 * WORLD < ranks.exchange.nbytes - before < 80 * WORLD


class ImpatientExchange(LocalExchange):
    """Waits for as long as `limit_s` says."""

    limit_s = HANG_S

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        return super().collect(keys, self.limit_s)


def test_a_rank_that_does_not_come_costs_a_checkpoint_and_not_the_run(tmp_path):
    """The save is reported as failed; when the rank is there again the next save works."""
    exchange = ImpatientExchange()
    ranks = Ranks(tmp_path, world=2, exchange=exchange)
    exchange.limit_s = 0.2
    tensors = {"model/a": numbers((9,))}
    ranks.savers[0].save(1, tensors, {}, layout={})
    (report,) = ranks.savers[0].wait()
    assert not report.committed
    assert "a rank did not answer" in str(report.error)
    late = threading.Thread(target=lambda: ranks.savers[1].save(1, tensors, {}, layout={}))
    late.start()
    late.join(HANG_S)
    ranks.savers[1].wait(HANG_S)
    exchange.limit_s = HANG_S
    reports, _ = ranks.save(2, lambda rank: tensors)
    assert all(report.committed for report in reports.values())


def test_names_that_no_rank_asks_for_or_that_are_missing_are_refused_on_all(tmp_path):
    """A stage asks for its own names; the comparison is with those of all stages."""
    stages = [{"model/a": numbers((5,))}, {"model/b": numbers((3,))}]
    _, manifest = Ranks(tmp_path, world=2).save(1, lambda rank: stages[rank])
    assert manifest is not None
    names = {"model/a", "model/b"}
    into = {"model/a": torch.zeros(5)}
    read_into(manifest, tmp_path, into, elsewhere=names)
    assert torch.equal(into["model/a"], stages[0]["model/a"])
    with pytest.raises(UsageError, match="only in it: model/b"):
        read_into(manifest, tmp_path, into)
    with pytest.raises(UsageError, match="missing in it: model/c"):
        read_into(manifest, tmp_path, into, elsewhere={*names, "model/c"})


def test_parts_of_another_shape_are_refused_once(tmp_path):
    """All parts of a tensor are compared, and the sentence lists the tensor once."""
    _, manifest = Ranks(tmp_path, world=1).save(1, lambda rank: {"model/a": numbers((6,))})
    assert manifest is not None
    parts = [Target(torch.zeros(2), (8,), (at,)) for at in (0, 2)]
    with pytest.raises(UsageError, match=r"other shapes: model/a \[6\] there, \[8\] here\. Set"):
        read_into(manifest, tmp_path, {"model/a": parts})


def test_the_board_does_not_grow_with_the_saves(tmp_path):
    """Keys of finished saves are forgotten: after five saves the board holds as much as after two."""
    ranks = Ranks(tmp_path)
    counts = []
    for step in range(1, 6):
        ranks.save(step, lambda rank: {"model/a": numbers((5,))})
        counts.append(len(ranks.exchange._values))
    assert counts[1:] == [counts[1]] * 4
