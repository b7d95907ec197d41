"""A process that reads batches for one thread of a rank, for decoding that is Python's own work.

The process is started by exec, never by a fork of a rank, which has threads. It imports and calls a function by name,
gets a `BatchReader`, and answers requests: an interval of positions in, a batch or a refusal out. Both directions carry
frames, which are a JSON header and the bytes of tensors; nothing is pickled. When the rank is gone the pipe ends, and
so does the process, even inside a data source that hangs.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

import msgspec
import torch
from torch import Tensor

from shoal.data.batches import BatchRead, BatchReader
from shoal.data.cursor import Interval
from shoal.data.sample import Batch, Tree
from shoal.errors import DataError, EnvironmentFault, ShoalError, UserCodeError

ALIGNED_BYTES = 64
CLOSING_S = 1.0
REFUSALS: dict[str, type[ShoalError]] = {
    "DataError": DataError,
    "UserCodeError": UserCodeError,
    "EnvironmentFault": EnvironmentFault,
}


@dataclass(frozen=True)
class Opening:
    """What a reader process calls: "package.module:function", and its keywords, which JSON can carry."""

    function: str
    arguments: Mapping[str, Any]


class ReaderProcess:
    """A `BatchReader` in a process of its own.

    Raises:
        ShoalError: what the function of `opening` raised, with its message.
    """

    def __init__(self, opening: Opening) -> None:
        self.where = ""
        """The process does not tell."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.data.reader_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._send({"function": opening.function, "arguments": opening.arguments})
        try:
            self._answer("opened the data")
        except ShoalError:
            self.close()
            raise

    def read(self, part: Interval) -> BatchRead:
        """See `BatchReader.read`.

        Raises:
            EnvironmentFault: the process died.
        """
        self._send({"start": part.start, "stop": part.stop})
        header, payload = self._answer(f"read the positions {part}")
        inputs, targets, weights, positions = (_tree(header[name], payload) for name in BATCH)
        assert isinstance(weights, Tensor)
        assert isinstance(positions, Tensor)
        return BatchRead(Batch(inputs, targets, weights=weights, positions=positions), tuple(header["skipped"]))

    def close(self) -> None:
        """Ends the process: at once if it does not do so by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, header: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: the answer says how
            _write(self._process.stdin, header, [])

    def _answer(self, deed: str) -> tuple[dict[str, Any], bytearray]:
        assert self._process.stdout is not None
        answer = _read(self._process.stdout)
        if answer is None:
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise EnvironmentFault(
                f"A reader process {how} while it {deed}: look for its error above, or for a lack of memory; fewer "
                "data.readers take less."
            )
        header, payload = answer
        if "refusal" in header:
            raise REFUSALS[header["refusal"]](header["message"])
        return header, payload


BATCH = ("inputs", "targets", "weights", "positions")


def _described(tree: Tree, pieces: list[Tensor], offset: int) -> tuple[Any, int]:
    """Where the leaves of `tree` stand in the payload; they are appended to `pieces`."""
    if isinstance(tree, Tensor):
        leaf = tree.contiguous()
        pieces.append(leaf)
        place = {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape), "offset": offset}
        return place, offset + _aligned(leaf.nbytes)
    branches = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    described = []
    for key, branch in branches:
        place, offset = _described(branch, pieces, offset)
        described.append([key, place])
    return {"branches": described, "named": isinstance(tree, dict)}, offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _tree(described: dict[str, Any], payload: bytearray) -> Tree:
    if "branches" in described:
        branches = [(key, _tree(branch, payload)) for key, branch in described["branches"]]
        return dict(branches) if described["named"] else tuple(branch for _, branch in branches)
    dtype, shape = getattr(torch, described["dtype"]), described["shape"]
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=described["offset"]).reshape(shape)


def _write(pipe: IO[bytes], header: Mapping[str, Any], pieces: list[Tensor]) -> None:
    content = msgspec.json.encode(header)
    payload_bytes = sum(_aligned(piece.nbytes) for piece in pieces)
    pipe.write(len(content).to_bytes(8, "little") + payload_bytes.to_bytes(8, "little") + content)
    for piece in pieces:
        pipe.write(piece.reshape(-1).view(torch.uint8).numpy().tobytes())
        pipe.write(bytes(_aligned(piece.nbytes) - piece.nbytes))
    pipe.flush()


def _read(pipe: IO[bytes]) -> tuple[dict[str, Any], bytearray] | None:
    """The next frame; None where the other side is gone."""
    sizes = pipe.read(16)
    if len(sizes) < 16:
        return None
    content = pipe.read(int.from_bytes(sizes[:8], "little"))
    payload = bytearray(int.from_bytes(sizes[8:], "little"))
    view, filled = memoryview(payload), 0
    while filled < len(payload):
        count = pipe.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            return None
        filled += count
    return msgspec.json.decode(content), payload


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers requests until there are no more; then the process ends, whatever it is doing."""
    incoming: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def receive() -> None:
        while (frame := _read(requests)) is not None:
            incoming.put(frame[0])
        os._exit(0)

    Thread(target=receive, name="shoal-requests", daemon=True).start()
    reader = _answered(answers, lambda: (_opened(incoming.get()), {}, []))
    while reader is not None:
        request = incoming.get()
        part = Interval(request["start"], request["stop"])
        _answered(answers, lambda part=part: _batch(reader, part))


def _opened(request: Mapping[str, Any]) -> BatchReader:
    module, _, function = request["function"].partition(":")
    return getattr(importlib.import_module(module), function)(**request["arguments"])


def _batch(reader: BatchReader, part: Interval) -> tuple[BatchReader, dict[str, Any], list[Tensor]]:
    read, pieces, offset = reader.read(part), [], 0
    header: dict[str, Any] = {"skipped": list(read.skipped)}
    for name in BATCH:
        header[name], offset = _described(getattr(read.batch, name), pieces, offset)
    return reader, header, pieces


def _answered(answers: IO[bytes], work: Any) -> BatchReader | None:
    """Does the work and sends what it gave, or why it gave nothing; then None."""
    try:
        reader, header, pieces = work()
    except ShoalError as error:
        kind = next((name for name, known in REFUSALS.items() if isinstance(error, known)), "UserCodeError")
        _write(answers, {"refusal": kind, "message": str(error)}, [])
        return None
    except Exception as error:
        _write(answers, {"refusal": "UserCodeError", "message": f"{type(error).__name__}: {error}"}, [])
        return None
    _write(answers, header, pieces)
    return reader


def main() -> None:
    """The process: answers go to what was standard output; what the user's code prints goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
