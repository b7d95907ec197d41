"""What an update is on its way: plain vectors, or a codec's payload with error feedback at the client.

    y = decode(encode(delta + e)),   e <- delta + e - y

e, the residual, is what the client has not sent yet (Karimireddy et al., arXiv:1901.09847). Both ends draw the codec's
random numbers from the same key, which follows from the run's seed, the client and the version.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Payload
from shoal.codec.config import CodecConfig, NoCodec
from shoal.config.check import implementation_of
from shoal.maths.counter import key_of


@dataclass(frozen=True)
class Upload:
    """How updates of `numel` numbers are sent. `codec` None: as they are, in `dtype`."""

    numel: int
    dtype: torch.dtype
    codec: Codec | None
    feedback: bool
    seed: int

    def nbytes(self, *, control: bool) -> int:
        """Bytes of the tensors of one update."""
        plain = self.numel * self.dtype.itemsize
        first = plain if self.codec is None else sum(field.nbytes for field in self.codec.fields(self.numel))
        return first + (plain if control else 0)

    def encode(self, delta: Tensor, residual: Tensor | None, *, client: str, version: int) -> Encoded:
        """What is sent for `delta`, what the server makes of it, and what is left over."""
        if self.codec is None:
            return Encoded((delta,), delta, None)
        whole = delta if residual is None else delta + residual
        key = self._key(client, version)
        payload = self.codec.encode(whole, key=key)
        arrives = self.codec.decode(payload, self.numel, key=key, dtype=delta.dtype).to(delta.dtype)
        return Encoded(payload, arrives, whole - arrives if self.feedback else None)

    def decode(self, payload: Payload, *, client: str, version: int) -> Tensor:
        """The change [numel] that a client's payload stands for."""
        if self.codec is None:
            return payload[0]
        key = self._key(client, version)
        return self.codec.decode(payload, self.numel, key=key, dtype=self.dtype).to(self.dtype)

    def fields(self) -> list[tuple[torch.dtype, int]]:
        """Type and length of each tensor of a payload."""
        if self.codec is None:
            return [(self.dtype, self.numel)]
        return [(field.dtype, field.numel) for field in self.codec.fields(self.numel)]

    def _key(self, client: str, version: int) -> int:
        return key_of(self.seed, "upload", client, version)


@dataclass(frozen=True)
class Encoded:
    """`payload`: what is sent; `arrives`: what the server makes of it; `residual`: what is left for the next time."""

    payload: Payload
    arrives: Tensor
    residual: Tensor | None


def upload_of(config: CodecConfig, *, numel: int, dtype: torch.dtype, seed: int) -> Upload:
    """How a run with this table `[codec]` sends updates."""
    codec = None if isinstance(config, NoCodec) else implementation_of(config)(config)
    return Upload(numel, dtype, codec, config.feedback, seed)
