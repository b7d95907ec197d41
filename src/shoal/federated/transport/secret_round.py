"""One attempt at a round of secure aggregation, as the server holds it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.federated.secure.messages import FromServer, Keys, Revealed, Sealed
from shoal.federated.secure.server import SecureServer
from shoal.federated.secure.summing import mean_update, quantiser_for
from shoal.federated.strategy import Update
from shoal.federated.task import Task
from shoal.federated.transport import frame
from shoal.federated.transport.messages import Look, Said, Secret


class SecretRound:
    """`cohort`: samples by client, as they said when they joined."""

    def __init__(self, task: Task, version: int, attempt: int, cohort: Mapping[str, int], *, now_s: float) -> None:
        assert task.secure is not None
        self.version, self.attempt = version, attempt
        self.quantiser = quantiser_for(task.secure, task.federated, cohort)
        least = max(2, task.federated.least_contributions)
        self.server = SecureServer(
            task.secure,
            tuple(sorted(cohort)),
            session=session_of(task.seed, version, attempt),
            numel=task.model.numel() + 1,
            dtype=self.quantiser.dtype,
            least=least,
            phase_s=task.federated.deadline_s,
            now_s=now_s,
        )
        quantiser = self.quantiser
        self.terms = Secret(quantiser.bits, quantiser.clip, quantiser.most_weight, least)

    def wants(self, client: str) -> bool:
        """Whether a client that asks for work may still take part."""
        return self.server.phase == "keys" and self.server.waits_for(client)

    def say(self, client: str, said: Said, now_s: float) -> None:
        """Takes a client's message. Raises `Refused`."""
        match said:
            case Keys():
                self.server.take_keys(client, said, now_s)
            case Sealed():
                self.server.take_shares(client, said, now_s)
            case Revealed():
                self.server.take_secrets(client, said, now_s)
            case Look():
                pass

    def next_for(self, client: str) -> FromServer | None:
        """What the client is told now."""
        return self.server.message_for(client)

    def take(self, client: str, vector: Tensor, now_s: float) -> None:
        """Takes a masked vector. Raises `Refused`."""
        self.server.take_vector(client, vector.numpy(), now_s)

    def expected(self) -> list[frame.Part]:
        """The parts of a masked update."""
        dtype = "uint32" if self.quantiser.dtype.itemsize == 4 else "uint64"
        return [frame.Part("masked", dtype, self.server.total.size)]

    def mean(self, *, like: Tensor) -> Update:
        """The mean of the cohort. Raises `EnvironmentFault` for a weight that cannot be."""
        contributors = len(self.server.contributors)
        return mean_update(
            self.server.total, self.quantiser, version=self.version, contributors=contributors, like=like
        )

    def lose(self, client: str, now_s: float) -> None:
        """A client is gone."""
        self.server.lose(client, now_s)

    def tick(self, now_s: float) -> None:
        """Lets time pass."""
        self.server.tick(now_s)


def session_of(seed: int, version: int, attempt: int) -> bytes:
    """What keys and masks of this attempt are bound to."""
    return f"shoal {seed} round {version} attempt {attempt}".encode()


def masked_tensor(vector: object) -> Tensor:
    """A masked vector of numpy as a tensor for a frame."""
    return torch.from_numpy(vector)  # type: ignore[arg-type]
