"""The files of both ends. At the server, a decision in the journal stands for files that are on the disk already.

    rounds.journal                 the decisions of `Rounds`
    state-00000012.safetensors     the model of version 12 and what the strategy keeps
    model-00000012.frame           the same model as clients download it
    rounds.jsonl                   a line for each model: what it cost and what was measured
    uploads/                       contributions of the present round; `.part` while they arrive

So a server that is killed between any two writes goes on with the contributions that count, each of them once.

A client keeps the state after its last contribution that counted, and the one after the newest. The server says which
contribution was the last that counted. If it is the newest, the state after it is the client's, even if the client was
killed before it heard so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace as with_values
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from shoal.coordinator.journal import Journal
from shoal.errors import CorruptCheckpoint
from shoal.federated.rounds import Decision, Rounds, Ticket
from shoal.federated.strategy import RoundPlan
from shoal.federated.transport import messages
from shoal.federated.work import ClientState
from shoal.files import make_durable
from shoal.observe.facts import replace_file

JOURNAL_VERSION = 201


class Store:
    """One run's folder. Raises `InUse` where another server has it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.uploads = directory, directory / "uploads"
        self.uploads.mkdir(parents=True, exist_ok=True)
        path = directory / "rounds.journal"
        self.journal: Journal[Decision] = Journal(path, Decision, version=JOURNAL_VERSION, service="federated server")

    def model_path(self, version: int, width: int = 0) -> Path:
        """What clients of this width download."""
        return self.directory / f"model-{version:08d}{f'-{width}' if width else ''}.frame"

    def upload_path(self, ticket: Ticket) -> Path:
        """Where a whole contribution lies."""
        return self.uploads / f"{ticket.version:08d}-{ticket.number:04d}-{ticket.client}.frame"

    def part_path(self, ticket: Ticket) -> Path:
        """Where it lies while it arrives."""
        return self.upload_path(ticket).with_suffix(".part")

    def write_model(
        self, version: int, state: dict[str, Tensor], plan: RoundPlan, corners: Sequence[Tensor] = ()
    ) -> None:
        """The files of a version, each whole or not at all, and durable: the state, and the frame of each width."""
        contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
        replace_file(self._state_path(version), save(contiguous))
        beside = {"control": plan.control, "others": plan.others}
        vectors = {"model": state["model"], **{name: one for name, one in beside.items() if one is not None}}
        for width, where in enumerate(corners, start=1):
            self._write_frame(self.model_path(version, width), version, {"model": state["model"][where]}, plan)
        self._write_frame(self.model_path(version), version, vectors, plan)  # the last: where it is, all are
        make_durable(self.directory)

    def _write_frame(self, path: Path, version: int, vectors: dict[str, Tensor], plan: RoundPlan) -> None:
        parts = tuple(messages.part_of(name, vector) for name, vector in vectors.items())
        header = messages.ModelHeader(version=version, pull=plan.pull, settings=dict(plan.settings), parts=parts)
        written = path.with_suffix(".part")
        messages.write_frame(written, header, list(vectors.values()))
        make_durable(written)
        written.replace(path)

    def read_state(self, version: int) -> dict[str, Tensor]:
        """Raises `CorruptCheckpoint`."""
        path = self._state_path(version)
        try:
            return load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpoint(
                f"{path}, the model that the journal speaks of, cannot be read ({error}): restore it, or begin again "
                "in another folder"
            ) from error

    def accept(self, ticket: Ticket) -> None:
        """Makes a contribution that is whole durable, under its last name."""
        make_durable(self.part_path(ticket))
        self.part_path(ticket).replace(self.upload_path(ticket))
        make_durable(self.uploads)

    def drop(self, ticket: Ticket) -> None:
        """Removes what there is of a contribution."""
        self.part_path(ticket).unlink(missing_ok=True)
        self.upload_path(ticket).unlink(missing_ok=True)

    def clean(self, rounds: Rounds) -> None:
        """Removes contributions that do not count, and models that nobody trains from."""
        counted = {*rounds.buffer, *(rounds.open.counted if rounds.open else ())}
        kept = {self.upload_path(ticket) for ticket in counted}
        for path in self.uploads.iterdir():
            if path not in kept and path.suffix == ".frame":
                path.unlink()
        oldest = min([rounds.version - 1, *(ticket.version for ticket in rounds.given.values())])
        for version in range(max(0, oldest - 2), max(0, oldest)):
            for path in self.directory.glob(f"model-{version:08d}*.frame"):
                path.unlink(missing_ok=True)
            self._state_path(version).unlink(missing_ok=True)

    def note(self, row: dict[str, Any]) -> None:
        """Adds a line for a model."""
        with (self.directory / "rounds.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """The last line for each model, in order; a line that a kill cut off is none."""
        path = self.directory / "rounds.jsonl"
        found: dict[int, dict[str, Any]] = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError:
                continue
            found[int(row["round"])] = row
        return [found[number] for number in sorted(found)]

    def _state_path(self, version: int) -> Path:
        return self.directory / f"state-{version:08d}.safetensors"


def digest_of(path: Path) -> str:
    """The hash of a file's bytes."""
    return blake3().update_mmap(path).hexdigest()


STATE_VECTORS = ("kept", "own", "residual", "personal")
"""The vectors of a `ClientState`, in its order."""


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
        vectors = {name: getattr(state, name) for name in STATE_VECTORS}
        tensors = {name: vector.contiguous() for name, vector in vectors.items() if vector is not None}
        about = {"ticket": msgspec.json.encode(ticket).decode(), "cluster": str(state.cluster)}
        replace_file(self.directory / "newest.safetensors", save(tensors, about))


def _read(path: Path) -> tuple[Ticket | None, ClientState]:
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            ticket = msgspec.json.decode(about.get("ticket", "null"), type=Ticket | None)
            cluster = msgspec.json.decode(about.get("cluster", "0"), type=int)
            vectors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise CorruptCheckpoint(
            f"{path}, what this client keeps between rounds, cannot be read ({error}): remove it, and the client "
            "begins anew"
        ) from error
    return ticket, ClientState(0, *(vectors.get(name) for name in STATE_VECTORS), cluster=cluster)
