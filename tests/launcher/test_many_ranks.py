"""What grows with the ranks is bounded: who is missing is found by halves, words are shared, a gather is read once."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from shoal.comm import packing
from shoal.comm.board import Board
from shoal.comm.packing import MANY, packed, unpacked
from shoal.errors import CollectiveError
from shoal.launcher.failure import Failure
from shoal.launcher.rendezvous import missing_ranks
from shoal.launcher.root_cause import Exit, failure_report, root_cause
from tests.waiting import HANG_S

HEAD = 4
"""Bytes of MessagePack before the content of a list of one value: one of the list, three of the value."""


@pytest.mark.parametrize("missing", [{17}, {0, 4095}, set(), {5, 6, 7}])
def test_missing_ranks_are_found_by_halves(missing: set[int]) -> None:
    """In O(log N) questions for each."""
    asked = []

    def there(ranks: range) -> bool:
        asked.append(ranks)
        return not missing & set(ranks)

    assert missing_ranks(there, 4096) == sorted(missing)
    assert len(asked) <= 1 + 2 * 12 * len(missing)


def test_a_gather_of_many_is_put_together_once() -> None:
    """All ranks read what rank 0 has published, in the order of ranks."""
    store, ranks = HashStore(), range(MANY)

    def one(rank: int) -> tuple[str, ...]:
        return Board(store, timeout_s=HANG_S).all_gather("x", f"rank {rank}", rank=rank, ranks=ranks)

    with ThreadPoolExecutor(MANY) as threads:
        found = list(threads.map(one, ranks))
    assert set(found) == {tuple(f"rank {rank}" for rank in ranks)}
    assert store.check(["x/all"])


def test_what_is_packed_and_unpacked_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same number of bytes: what one rank may publish, the others can read."""
    assert unpacked(packed([b"a", b""])) == [b"a", b""]
    monkeypatch.setattr(packing, "MOST_PACKED_BYTES", 1000)
    most, more = [bytes(1000 - HEAD)], [bytes(1001 - HEAD)]
    assert unpacked(packed(most)) == most
    with pytest.raises(CollectiveError, match="use smaller groups"):
        packed(more)
    with pytest.raises(CollectiveError, match="use smaller groups"):
        unpacked(zlib.compress(msgspec.msgpack.encode(more)))


def test_the_cause_among_4096_is_first_and_the_rest_is_a_line() -> None:
    """Rank 17 failed; 4,094 lost it, and one was killed."""
    exits = [Exit(rank=rank, pid=rank, code=1, time_ns=rank) for rank in range(4095)]
    exits.append(Exit(rank=4095, pid=1, code=-9, time_ns=9, by_launcher=True))

    def failure(rank: int) -> Failure:
        lost = {"kind": "DistBackendError", "message": "Connection closed by peer", "secondary": True}
        own = {"kind": "ValueError", "message": "a NaN at step 3", "secondary": False}
        return Failure(rank=rank, host="h", pid=rank, time_ns=rank, exit_code=1, **(own if rank == 17 else lost))  # type: ignore[arg-type]

    ends = root_cause(map(failure, range(4095)), exits)
    lines = failure_report(ends, exits, stopped={}, log_tails={}).splitlines()
    assert lines[:2] == ["rank 17 of 4096 failed (host h, pid 17, exit code 1):", "a NaN at step 3"]
    assert lines[2:] == [
        "4094 ranks (0-16, 18-4094): lost another rank", "1 rank (4095): ended by the launcher"
    ]  # fmt: skip
