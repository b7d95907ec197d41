"""Coded pieces: what the ranks of a shard group send each other under ZeRO."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.codec.codec import Codec
from shoal.codec.config import ShardCodecConfig
from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import AllReduce, PieceCodecs
from shoal.config.check import implementation_of
from tests.comm.local import local_group
from tests.waiting import HANG_S

PIECE, BLOCK = 40, 16
"""40 numbers are two blocks and a part of one."""
FORMATS = ("bfloat16", "int8", "int4")
WEIGHTS = ("bfloat16", "int8")


def codec_of(choice: str) -> Codec:
    config = ShardCodecConfig(gradients=choice, block=BLOCK).codec("gradients")  # type: ignore[arg-type]
    assert config is not None
    return implementation_of(config)(config)


def on_ranks(size: int, work: Callable[[Collective], Any]) -> list[Any]:
    """What `work(group)` returns on each rank, in threads."""
    found: list[Any] = [None] * size
    groups = local_group(size)

    def run(rank: int) -> None:
        found[rank] = work(groups[rank])

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads)
    return found


def term(rank: int, size: int, turn: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(size * PIECE, generator=generator)


def through(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.numel())


@pytest.mark.parametrize("choice", FORMATS)
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_its_piece_of_the_sum(choice: str, size: int) -> None:
    """Its own term as it is, and each other's rounded once; a second microbatch adds to the first."""
    codec = codec_of(choice)

    def work(group: Collective) -> Tensor:
        piece = torch.zeros(PIECE)
        exchange = PieceCodecs(gradients=codec).scatter(group, piece, AllReduce(local_group(1)[0], piece))
        exchange.start()
        for turn in range(2):
            buffer = term(group.rank, size, turn)
            exchange.send(buffer)
            buffer.fill_(math.nan)  # it was read when it was sent
            exchange.land()
        exchange.settle()
        exchange.wait()
        return piece

    for rank, piece in enumerate(on_ranks(size, work)):
        mine, wanted = slice(rank * PIECE, (rank + 1) * PIECE), torch.zeros(PIECE)
        for turn in range(2):
            total = term(rank, size, turn)[mine].clone()
            for other in range(size):
                if other != rank:
                    total += through(codec, term(other, size, turn)[mine])
            wanted = total if turn == 0 else wanted + total
        assert torch.equal(piece, wanted)


@pytest.mark.parametrize("choice", FORMATS)
def test_what_is_not_finite_reaches_the_rank_that_keeps_the_sum(choice: str) -> None:
    """Infinity in one rank's term makes the sum not finite where the number belongs."""

    def work(group: Collective) -> bool:
        piece, buffer = torch.zeros(PIECE), term(group.rank, 2)
        if group.rank == 0:
            buffer[PIECE + 3] = math.inf
        exchange = PieceCodecs(gradients=codec_of(choice)).scatter(group, piece, AllReduce(local_group(1)[0], piece))
        exchange.start()
        exchange.send(buffer)
        exchange.settle()
        exchange.wait()
        return bool(piece.isfinite().all())

    assert on_ranks(2, work) == [True, False]


@pytest.mark.parametrize("choice", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_gather_the_same_bits(choice: str, dtype: torch.dtype) -> None:
    """Each piece decoded, that of the rank itself too; and the piece stays as it was."""
    codec, size = codec_of(choice), 3
    pieces = [term(rank, 1).to(dtype) for rank in range(size)]

    def work(group: Collective) -> Tensor:
        whole, piece = torch.zeros(size * PIECE, dtype=dtype), pieces[group.rank].clone()
        PieceCodecs(weights=codec).gather(group, whole, piece).wait()
        assert torch.equal(piece, pieces[group.rank])
        return whole

    wanted = torch.cat([through(codec, piece).to(dtype) for piece in pieces])
    for whole in on_ranks(size, work):
        assert torch.equal(whole, wanted)
    if dtype == torch.float32:
        assert not torch.equal(wanted, torch.cat(pieces))
