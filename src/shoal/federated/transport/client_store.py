"""What a client keeps on its disk: the state after its last contribution that counted, and the one after the newest.

The server says which contribution was the last that counted. If it is the newest, the state after it is the client's,
even if the client was killed before it heard so.
"""

from __future__ import annotations

from dataclasses import replace as with_values
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shoal.errors import CorruptCheckpoint
from shoal.federated.client_work import ClientState
from shoal.federated.report import replace
from shoal.federated.rounds import Ticket


class ClientStore:
    """A client's folder, its own alone."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory

    def model_path(self, version: int) -> Path:
        """Where a model is downloaded to; older ones are removed."""
        path = self.directory / f"model-{version:08d}.frame"
        for other in self.directory.glob("model-*.frame"):
            if other != path:
                other.unlink(missing_ok=True)
        return path

    def state(self, *, turn: int, last: Ticket | None) -> ClientState:
        """The state after the contribution `last`; `turn` is the server's count. Raises `CorruptCheckpoint`."""
        newest, counted = self.directory / "newest.safetensors", self.directory / "counted.safetensors"
        if newest.exists() and (kept := _read(newest))[0] == last:
            newest.replace(counted)
            return with_values(kept[1], turn=turn)
        if counted.exists() and (kept := _read(counted))[0] == last:
            return with_values(kept[1], turn=turn)
        return ClientState(turn=turn)

    def keep(self, ticket: Ticket, state: ClientState) -> None:
        """Keeps the state after `ticket`, before it is sent."""
        vectors = {"kept": state.kept, "own": state.own, "residual": state.residual}
        tensors = {name: vector.contiguous() for name, vector in vectors.items() if vector is not None}
        about = {"ticket": msgspec.json.encode(ticket).decode()}
        replace(self.directory / "newest.safetensors", save(tensors, about))


def _read(path: Path) -> tuple[Ticket | None, ClientState]:
    try:
        with safe_open(path, "pt") as file:
            ticket = msgspec.json.decode((file.metadata() or {}).get("ticket", "null"), type=Ticket | None)
            vectors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise CorruptCheckpoint(
            f"{path}, what this client keeps between rounds, cannot be read ({error}): remove it, and the client "
            "begins anew"
        ) from error
    return ticket, ClientState(0, vectors.get("kept"), vectors.get("own"), vectors.get("residual"))
