"""`AuthenticatedStore`: a rank's connection to the job's store, as PyTorch's groups use one.

Process groups in C++ call a `torch.distributed.Store` that is written in Python through pybind11. C++ holds no
reference to the Python half: the thread that reads the connection does, until it is closed or lost. All threads share
the connection (`connection.py`), so `clone` is the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistNetworkError, DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from shoal.launcher.store.connection import StoreConnection, StoreLate, StoreLost
from shoal.launcher.store.messages import Operation, Reply

T = TypeVar("T")


# pyright: reportIncompatibleMethodOverride=false
# The stubs of Store list overloads that differ from what C++ calls.


class AuthenticatedStore(Store):
    """Over a connection to the store, which ends with `close`.

    As PyTorch's stores, all methods raise `DistStoreError` where keys do not come within the timeout, and
    `DistNetworkError` where the store is gone or does not answer.
    """

    def __init__(self, connection: StoreConnection, *, timeout_s: float) -> None:
        super().__init__()
        self._connection = connection
        connection.kept_alive = self
        self.set_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """See `StoreConnection.close`."""
        self._connection.close()

    def give_up(self, sentence: str) -> None:
        """See `StoreConnection.give_up`."""
        self._connection.give_up(sentence)

    def clone(self) -> AuthenticatedStore:
        """This store: its connection serves any number of threads."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._translated(lambda: self._connection.get_all(keys, timeout_s=self._timeout_s)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, timeout_s=self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", keys).found

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).amount

    def append(self, key: str, value: bytes | str) -> None:
        self._ask("append", [key], [value])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask("compare_set", [key], [expected, desired]).values[0]

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", [key]).found

    def num_keys(self) -> int:
        return self._ask("num_keys").amount

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._ask("list_keys").values]

    def has_extended_api(self) -> bool:
        return True

    # By these names C++ calls them.
    deleteKey, getNumKeys = delete_key, num_keys

    @property
    def _timeout_s(self) -> float:
        return self.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue] missing in torch's stubs

    def _ask(
        self,
        operation: Operation,
        keys: Sequence[str] = (),
        values: Sequence[bytes | str] = (),
        *,
        amount: int = 0,
        timeout_s: float = 0.0,
    ) -> Reply:
        ask = self._connection.ask
        return self._translated(lambda: ask(operation, keys, values, amount=amount, timeout_s=timeout_s))

    def _translated(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except StoreLate as error:
            raise DistStoreError(str(error)) from None
        except StoreLost as error:
            raise DistNetworkError(str(error)) from None
