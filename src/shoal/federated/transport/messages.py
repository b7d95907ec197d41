"""What travels: bounded structs in MessagePack, and frames, which carry vectors as safetensors does.

    8 bytes       length of the header, little-endian
    the header    {"parts": [{"name", "dtype", "numel"}, ...], ...}, of a struct with bounds on every field
    the rest      the parts one behind the other, little-endian

Nothing is evaluated and nothing is unpickled. A frame is checked against what is expected before its numbers are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.errors import EnvironmentFault
from shoal.federated.rounds import Ticket
from shoal.federated.secure.messages import Keys, Revealed, Roster, Sealed, Survivors

MOST_MESSAGE_BYTES = 16 << 20
Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client is there. `layout` is the fingerprint of its parameters, `strategy` that of its table `[federated]`."""

    samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    layout: Text
    strategy: Text


class Enrol(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a certificate, in JSON: a token of the server's, a name, and a signing request in PEM."""

    token: Text
    name: Text
    request: Annotated[str, msgspec.Meta(max_length=4096)]


class Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How this round's update is masked: see `secure.summing.Quantiser`. `least`: fewer clients hide nobody."""

    bits: Annotated[int, msgspec.Meta(ge=2, le=32)]
    clip: Annotated[float, msgspec.Meta(gt=0)]
    most_weight: Annotated[int, msgspec.Meta(ge=1)]
    least: Annotated[int, msgspec.Meta(ge=2)]


class Train(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="train"):
    """Work. `turn` and `last`: how many contributions of this client are in the model, and the last of them."""

    ticket: Ticket
    turn: Annotated[int, msgspec.Meta(ge=0)]
    last: Ticket | None = None
    secret: Secret | None = None


class Wait(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wait"):
    """Nothing to do yet; ask again after so long."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Over(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="over"):
    """The last model is made."""


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ended"):
    """A ticket is settled: its update `counted`, or not, because of `reason`."""

    counted: bool
    reason: Text = ""


class Received(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="received"):
    """So many bytes of an upload are here."""

    size: Annotated[int, msgspec.Meta(ge=0)]


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refusal"):
    """Why something cannot be. `join_first`: the server does not know the client, such as after its restart."""

    sentence: Text
    join_first: bool = False


class Look(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="look"):
    """Asks what comes next in secure aggregation."""


Said = Keys | Sealed | Revealed | Look
Answer = Train | Wait | Over | Ended | Received | Refusal | Roster | Sealed | Survivors
ANSWER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)
SAID: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Said)
JOIN: msgspec.msgpack.Decoder[Join] = msgspec.msgpack.Decoder(Join)
ENROL: msgspec.json.Decoder[Enrol] = msgspec.json.Decoder(Enrol)
T = TypeVar("T")


class BadMessage(EnvironmentFault):
    """Bytes that are no message of this protocol."""


class Stream(Protocol):
    """A body that arrives in pieces; an empty piece is its end."""

    async def readany(self) -> bytes:
        """What has arrived, at least one byte before the end."""
        ...


async def body_of(stream: Stream, *, most: int) -> bytes:
    """All of a body, however many pieces it arrives in. Raises `BadMessage` for more than `most` bytes."""
    body = bytearray()
    while piece := await stream.readany():
        body += piece
        if len(body) > most:
            raise BadMessage(f"a message has more than {most} bytes")
    return bytes(body)


def decode(decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T], body: bytes) -> T:
    """The message in `body`. Raises `BadMessage`."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"a message is none of this version ({error}): run one version of Shoal everywhere") from None


MOST_HEADER_BYTES = 1 << 16
ALIGNMENT_BYTES = 64
"""The header is filled up with spaces, so that numbers begin at a multiple of this."""
DType = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
]  # fmt: skip
Short = Annotated[str, msgspec.Meta(max_length=128)]


class BadFrame(EnvironmentFault):
    """Bytes that are no frame, or not the one that was expected."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vector."""

    name: Short
    dtype: DType
    numel: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return getattr(torch, self.dtype).itemsize * self.numel


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every frame says."""

    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=64)] = ()


class ModelHeader(Header, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model, and what its clients get beside it: `pull` and `settings` of the strategy's plan."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    pull: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    settings: Annotated[dict[Short, bool | int | float | Text], msgspec.Meta(max_length=64)] = {}


MOST_FIGURE = 1e30
"""Largest figure that a client may report: means of such figures over any samples are finite."""
Reported = Annotated[float, msgspec.Meta(ge=-MOST_FIGURE, le=MOST_FIGURE)]


class UpdateHeader(Header, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An update; who sends it is on the certificate, and what it is for on the ticket."""

    samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    cluster: Annotated[int, msgspec.Meta(ge=0, lt=64)] = 0
    width: Annotated[int, msgspec.Meta(ge=0, lt=16)] = 0
    metrics: Annotated[dict[Short, Reported], msgspec.Meta(max_length=32)] = {}


H = TypeVar("H", bound=Header)


class Frame(Generic[H]):
    """A frame read from a file. Its vectors are mapped into memory, and copied where they are changed."""

    def __init__(self, header: H, vectors: dict[str, Tensor]) -> None:
        self.header, self.vectors = header, vectors


def part_of(name: str, vector: Tensor) -> Part:
    """How a vector stands in a header."""
    return Part(name, str(vector.dtype).removeprefix("torch."), vector.numel())  # type: ignore[arg-type]


def frame_head(header: Header) -> bytes:
    """The bytes before the numbers."""
    body = msgspec.json.encode(header)
    body += b" " * (-(8 + len(body)) % ALIGNMENT_BYTES)
    return len(body).to_bytes(8, "little") + body


def bytes_of(vector: Tensor) -> memoryview:
    """The bytes of a vector [numel]."""
    return vector.detach().contiguous().view(torch.uint8).numpy().data


def write_frame(path: Path, header: Header, vectors: Sequence[Tensor]) -> None:
    """Writes a frame; the caller makes it durable."""
    with path.open("wb") as file:
        file.write(frame_head(header))
        for vector in vectors:
            file.write(bytes_of(vector))


def read_frame(path: Path, kind: type[H], expected: Callable[[H], Sequence[Part]] | None = None) -> Frame[H]:
    """The frame in a file. `expected`: the only parts that one with this header may have. Raises `BadFrame`."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= MOST_HEADER_BYTES or 8 + length > size:
            raise BadFrame(
                f"a frame of {size} bytes says that its header has {length}: it may have {MOST_HEADER_BYTES}"
            )
        try:
            header = msgspec.json.decode(file.read(length), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"the header of a frame is none of this version ({error})") from None
    if expected is not None and list(header.parts) != (right := list(expected(header))):
        raise BadFrame(f"a frame has {_told(header.parts)}, and {_told(right)} is expected")
    if 8 + length + sum(part.nbytes for part in header.parts) != size:
        raise BadFrame(f"a frame of {size} bytes does not have the length of its {len(header.parts)} vectors")
    return Frame(header, _mapped(path, 8 + length, header.parts))


def largest_bytes(parts: Sequence[Part]) -> int:
    """More than a frame of these parts can have."""
    return 8 + MOST_HEADER_BYTES + sum(part.nbytes for part in parts)


def _mapped(path: Path, at: int, parts: Sequence[Part]) -> dict[str, Tensor]:
    vectors = {}
    for part in parts:
        raw = np.memmap(path, np.uint8, "c", at, part.nbytes) if part.nbytes else np.empty(0, np.uint8)
        vectors[part.name] = _typed(raw, part)
        at += part.nbytes
    return vectors


def _typed(raw: np.ndarray, part: Part) -> Tensor:
    dtype = getattr(torch, part.dtype)
    if not part.numel:
        return torch.empty(0, dtype=dtype)
    aligned = raw if raw.ctypes.data % dtype.itemsize == 0 else raw.copy()
    return torch.from_numpy(aligned).view(dtype)


def _told(parts: Sequence[Part]) -> str:
    return ", ".join(f"{part.name} ({part.numel} of {part.dtype})" for part in parts) or "nothing"
