"""What a client and the server say to each other beside models and updates: bounded structs in MessagePack."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

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


class Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How this round's update is masked: see `secure.masks.Quantiser`. `least`: fewer clients hide nobody."""

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
T = TypeVar("T")


class BadMessage(EnvironmentFault):
    """Bytes that are no message of this protocol."""


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """The message in `body`. Raises `BadMessage`."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"a message is none of this version ({error}): run one version of Shoal everywhere") from None
