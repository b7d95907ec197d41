"""Signs of life: who still writes is waited for, who does not is given up, and nobody waits for more than that."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.checkpoint import agreement
from shoal.checkpoint.agreement import Chain, InventoryAgreement, LocalExchange, NotTold, hear
from shoal.checkpoint.plan import Item, encode
from shoal.checkpoint.save import SaveReport
from shoal.comm import packing
from shoal.comm.packing import MANY
from shoal.errors import CollectiveError
from shoal.topology.holding import Box
from tests.checkpoint.states import LAYOUT, on_ranks, saver_for, state_of
from tests.waiting import HANG_S, NEVER_S


def nothing() -> None:
    """For a reader that does not count."""


@pytest.mark.parametrize("moves", [0, 1, 7])
def test_a_message_is_heard_after_any_number_of_signs(moves: int) -> None:
    """With a sign for every move, two ranks' messages come back in order, with the keys of all links."""
    board, heard = LocalExchange(), []
    for rank, count in enumerate((moves, 2)):
        chain = Chain(board, f"share-{rank}", timeout_s=0.0)
        for _ in range(count):
            chain.moved()
        chain.say(f"message {rank}".encode())
    messages, links = hear(board, ["share-0", "share-1"], timeout_s=HANG_S, on_sign=lambda: heard.append(1))
    assert messages == [b"message 0", b"message 1"]
    assert sorted(links) == sorted(board._values)
    assert len(heard) == 1 + max(moves, 2)


def test_signs_are_rare() -> None:
    """Moves in quick succession say nothing; what is counted is every one."""
    board = LocalExchange()
    chain = Chain(board, "share", timeout_s=NEVER_S)
    for _ in range(1000):
        chain.moved()
    assert (chain.progress, board._values) == (1000, {})


def test_who_says_no_more_is_given_up() -> None:
    """After two signs nothing follows: the link that is missing is named."""
    board = LocalExchange()
    chain = Chain(board, "share-3", timeout_s=0.0)
    chain.moved()
    chain.moved()
    with pytest.raises(TimeoutError, match="share-3/2"):
        hear(board, ["share-3"], timeout_s=0.05, on_sign=nothing)


class Gone(LocalExchange):
    """Takes nothing, and counts the tries."""

    tries = 0

    def publish(self, key: str, value: bytes) -> None:
        self.tries += 1
        raise TimeoutError("the store did not answer")


def test_an_exchange_that_is_gone_is_tried_once() -> None:
    """Each try can cost the whole timeout: a rank that writes a hundred objects tries one sign."""
    board = Gone()
    chain = Chain(board, "share", timeout_s=0.0)
    for _ in range(100):
        chain.moved()
    with pytest.raises(NotTold, match="did not answer"):
        chain.say(b"message")
    assert board.tries == 1


def test_a_save_whose_every_action_gives_a_sign_counts_and_clears_the_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks save twice. After the second, the board holds nothing of the first."""
    monkeypatch.setattr(agreement, "SIGN_EVERY", 0.0)
    board, reports = LocalExchange(), dict[int, list[SaveReport]]()

    def work(rank: int) -> None:
        saver = saver_for(tmp_path, rank=rank, world_size=3, exchange=board)
        for step in (1, 2):
            saver.save(step, state_of(step), {"step": step}, layout=LAYOUT)
            reports.setdefault(rank, []).extend(saver.wait(HANG_S))

    on_ranks(3, work)
    assert [(report.step, report.error) for rank in range(3) for report in reports[rank]] == [(1, None), (2, None)] * 3
    assert any("verdict/5" in key for key in board._values), "no sign was given"
    assert [key for key in board._values if not key.startswith("checkpoint/0/2/1/verdict/")] == []


def test_a_disk_that_hangs_ends_every_wait(tmp_path: Path) -> None:
    """`wait` reports it, the next `save` does not wait for it for ever, and takes no memory that is still read."""
    hold = threading.Event()
    saver = saver_for(
        tmp_path, timeout_s=0.05, on_point=lambda label: label != "commit/rename.before" or hold.wait(HANG_S)
    )
    saver.save(1, state_of(1), {}, layout=LAYOUT)
    (report,) = saver.wait()
    assert not report.committed
    assert "has not answered the save of step 1 for 0.1 s: check the disk" in str(report.error)
    saver.save(2, state_of(2), {}, layout=LAYOUT)
    (report,) = saver.poll()
    assert (report.step, report.committed) == (2, False)
    assert "the checkpoint of step 2 was not saved, and there is none yet: " in str(report.error)
    hold.set()
    assert [report.step for report in saver.wait(HANG_S)] == [1]


class CountingExchange(LocalExchange):
    """One rank's end of `board`, which counts the values that it reads."""

    def __init__(self, board: LocalExchange) -> None:
        self._values, self._changed, self.read = board._values, board._changed, 0

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        self.read += len(keys)
        return super().collect(keys, timeout_s)


def one_tensor(world: int, *, alike: bool) -> list[list[Item]]:
    """What each rank holds: the same row of a matrix, or one of its own."""
    return [
        [Item(100 * "w", "float32", (world, 4), (Box((0 if alike else rank, 0), (1, 4)),))] for rank in range(world)
    ]


def agreed(board: LocalExchange, held: list[list[Item]], *, calls: int = 2) -> list[list[object]]:
    """For each rank what it learns in each call, and how many values it has read by then."""
    world = len(held)
    exchanges = [CountingExchange(board) for _ in range(world)]
    found: list[list[object]] = [[] for _ in range(world)]

    def rank(number: int) -> None:
        own = InventoryAgreement(exchanges[number], rank=number, world_size=world, timeout_s=HANG_S)
        for call in range(1, calls + 1):
            found[number].append(own.inventories(held[number], generation=0, call=call))
            found[number].append(exchanges[number].read)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_read_few_values_however_many_there_are(alike: bool) -> None:
    """Of 130 ranks all but rank 0 read two values in the first save, or one for each 64 inventories and one more where
    every rank holds something else, and one in the next; all learn what each rank holds. Nothing of the first save is
    left then but the inventories.
    """
    world, board = 130, LocalExchange()
    held = one_tensor(world, alike=alike)
    found = agreed(board, held)
    everyone = {tuple(range(world)): held[0]} if alike else {(number,): held[number] for number in range(world)}
    groups = 1 if alike else 3
    for number in range(1, world):
        assert found[number] == [everyone, 1 + groups, everyone, 2 + groups]
    assert found[0][0] == everyone
    assert not [key for key in board._values if key.startswith("checkpoint/0/held/1/")]


class InTurn(LocalExchange):
    """Once `ranks` wait, the one that would wait the shortest gives up."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.waiting = ranks, list[float]()

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        def is_over() -> bool:
            gives_up = len(self.waiting) == self.ranks and timeout_s == min(self.waiting)
            return gives_up or all(key in self._values for key in keys)

        with self._changed:
            self.waiting.append(timeout_s)
            self._changed.notify_all()
            assert self._changed.wait_for(is_over, HANG_S)
            self.waiting.remove(timeout_s)
        return super().collect(keys, 0.0)


def test_all_of_many_ranks_name_the_one_that_is_missing() -> None:
    """Rank 5 of 64 says nothing. Rank 0, which comes last, says so, and the others hear it before they give up."""
    board, held, errors = InTurn(MANY - 1), one_tensor(MANY, alike=True), dict[int, str]()

    def rank(number: int) -> None:
        own = InventoryAgreement(board, rank=number, world_size=MANY, timeout_s=1.0)
        with pytest.raises((TimeoutError, CollectiveError)) as caught:
            own.inventories(held[number], generation=0, call=1)
        errors[number] = str(caught.value)

    threads = [threading.Thread(target=rank, args=(number,)) for number in reversed(range(MANY)) if number != 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == MANY - 1
    assert all("nothing was published under checkpoint/0/held/1/5 within" in error for error in errors.values())


@pytest.mark.parametrize(("together", "values"), [(3, 22), (0.5, 64)])
def test_long_inventories_are_put_together_in_smaller_groups(
    monkeypatch: pytest.MonkeyPatch, together: float, values: int
) -> None:
    """64 ranks learn what each holds where a value may carry three inventories, and where it may carry none: each is
    then read where it lies.
    """
    held = one_tensor(MANY, alike=False)
    nbytes = max(len(encode(own)) for own in held)
    monkeypatch.setattr(agreement, "TOGETHER_BYTES", int(together * nbytes))
    monkeypatch.setattr(packing, "MOST_PACKED_BYTES", 6000)  # what ranks announce, or a few inventories
    found = agreed(LocalExchange(), held, calls=1)
    everyone = {(number,): held[number] for number in range(MANY)}
    assert found[0][0] == everyone
    assert found[1:] == [[everyone, 1 + values]] * (MANY - 1)
