"""`StoreBoard`: small messages between ranks through the job's store, as `shoal.comm.board` has them, without torch.

Keys and values are those of a `Board` over a `PrefixStore`, so that ranks with and without torch meet under one key.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.comm.packing import MANY, packed, unpacked
from shoal.errors import CollectiveError
from shoal.launcher.store.connection import StoreConnection, StoreLate, StoreLost

_ONE_PART = b"1\n"  # see `shoal.comm.board`: a message says first in how many parts it comes


class StoreBoard:
    """`timeout_s` bounds each call. All methods raise `CollectiveError` where the store is gone, or a rank late."""

    def __init__(self, connection: StoreConnection, prefix: str, *, timeout_s: float) -> None:
        self._connection, self._prefix, self.timeout_s = connection, prefix, timeout_s

    def under(self, prefix: str) -> StoreBoard:
        """The same board for keys below `prefix`."""
        return StoreBoard(self._connection, f"{self._prefix}/{prefix}", timeout_s=self.timeout_s)

    def publish(self, key: str, value: bytes) -> None:
        """Makes `value`, up to a few MB, readable under `key`."""
        try:
            self._connection.ask("set", [f"{self._prefix}/{key}"], [_ONE_PART + value])
        except StoreLost as error:
            raise CollectiveError(_lost(error)) from None

    def published(self, key: str) -> bool:
        """Whether there is something under `key` now."""
        try:
            return self._connection.ask("check", [f"{self._prefix}/{key}"]).found
        except StoreLost as error:
            raise CollectiveError(_lost(error)) from None

    def all_gather(self, key: str, text: str, *, rank: int, ranks: Sequence[int]) -> tuple[str, ...]:
        """What each of `ranks` passes as `text`, in their order; `rank` is this one's place among them."""
        keys = [f"{self._prefix}/{key}/{place}" for place in range(len(ranks))]
        self.publish(f"{key}/{rank}", text.encode())
        try:
            return tuple(value.decode() for value in self._values(key, keys, rank))
        except StoreLost as error:
            raise CollectiveError(_lost(error)) from None
        except StoreLate:
            missing = [f"rank {name}" for name, place in zip(ranks, keys, strict=True) if not self._there(place)]
            raise CollectiveError(
                f"rank {ranks[rank]} waited {self.timeout_s:g} s for {', '.join(missing[:8]) or 'the others'} of "
                f"{len(ranks)} ranks: they are dead, stopped or slow to start; see their logs"
            ) from None

    def _values(self, key: str, keys: Sequence[str], rank: int) -> list[bytes]:
        """From many ranks on, rank 0 reads all values and publishes them once, packed, as `shoal.comm.board` does."""
        if len(keys) >= MANY and rank != 0:
            (whole,) = self._connection.get_all([f"{self._prefix}/{key}/all"], timeout_s=self.timeout_s)
            return unpacked(whole.removeprefix(_ONE_PART))
        values = [v.removeprefix(_ONE_PART) for v in self._connection.get_all(keys, timeout_s=self.timeout_s)]
        if len(keys) >= MANY:
            self.publish(f"{key}/all", packed(values))
        return values

    def _there(self, key: str) -> bool:
        return self._connection.ask("check", [key]).found


def _lost(error: StoreLost) -> str:
    return f"the job's store is gone ({error}): rank 0, which hosts it, has ended; see its log"
