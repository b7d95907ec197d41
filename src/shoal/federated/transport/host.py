"""`Host`: what the server does, without the network. State machines above, files below.

Whatever is answered follows from decisions that are in the journal. Secure aggregation keeps its vectors in memory: a
restart before secrets are asked for begins another attempt; after that, the round passes without an update, because two
sums of one round over different clients would tell them apart. With privacy of clients, a round that too few take part
in passes, too: to draw its clients again would raise the chance of each above what the accountant counts.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.errors import EnvironmentFault
from shoal.federated.privacy.accountants import Budget, chance_of, client_budget
from shoal.federated.report import RoundFigures
from shoal.federated.robust import refusal
from shoal.federated.rounds import Rounds, Ticket
from shoal.federated.secure.messages import Keys, Revealed, Sealed
from shoal.federated.secure.server import SecureServer
from shoal.federated.secure.summing import fewest_in_sum, mean_update, noise_of_clients, quantiser_for, skellam_of
from shoal.federated.strategy import Update, norms_of
from shoal.federated.task import Task
from shoal.federated.transport import messages
from shoal.federated.transport.messages import Look, Said, Secret
from shoal.federated.transport.store import Store, digest_of
from shoal.federated.work import ServerModel

POLL_S = 0.2
"""After how long a client that has nothing to do asks again."""


class SecretRound:
    """One attempt at a round of secure aggregation. `cohort`: samples by client, as they said when they joined."""

    def __init__(self, task: Task, version: int, attempt: int, cohort: Mapping[str, int], *, now_s: float) -> None:
        assert task.secure is not None
        self.version, self.attempt = version, attempt
        noise = noise_of_clients(task.privacy, task.secure, task.federated, numel=task.model.numel())
        self.quantiser = quantiser_for(task.secure, task.federated, cohort, noise=noise)
        least = fewest_in_sum(task.federated)
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

    def expected(self) -> list[messages.Part]:
        """The parts of a masked update."""
        dtype = "uint32" if self.quantiser.dtype.itemsize == 4 else "uint64"
        return [messages.Part("masked", dtype, self.server.total.size)]

    def mean(self, *, like: Tensor) -> Update:
        """The mean of the cohort. Raises `EnvironmentFault` for a weight that cannot be."""
        contributors = len(self.server.contributors)
        return mean_update(
            self.server.total, self.quantiser, version=self.version, contributors=contributors, like=like
        )


def session_of(seed: int, version: int, attempt: int) -> bytes:
    """What keys and masks of this attempt are bound to."""
    return f"shoal {seed} round {version} attempt {attempt}".encode()


class Host:
    """`clock` counts seconds. `silence_s`: a client that is silent for so long is gone. `told` hears sentences."""

    def __init__(
        self,
        task: Task,
        store: Store,
        *,
        clock: Callable[[], float],
        told: Callable[[str], object] = str,
        silence_s: float = 15.0,
    ) -> None:
        self.task, self.clock, self.told, self.silence_s = task, clock, told, silence_s
        self.store = store
        self.server = ServerModel(task)
        self.strategy = strategy_of(task)
        self.budget: Budget | None = None
        if task.privacy is not None and task.privacy.unit == "client":
            noise = skellam_of(task.privacy, task.secure, task.federated, numel=task.model.numel())
            self.budget = client_budget(task.privacy, task.federated, skellam=noise)
        self.rounds = Rounds(
            task.federated,
            versions=task.rounds if self.budget is None else self.budget.rounds(task.rounds),
            seed=task.seed if task.privacy is None else secrets.randbits(62),  # who takes part is part of the secret
            poisson=chance_of(task.federated) if self.server.private is not None else None,
            history=self.store.journal.read(),
        )
        self.secret: SecretRound | None = None
        self.advancing = False
        self.row = RoundFigures(self.rounds.version + 1)
        self._seen_s: dict[str, float] = {}
        self._began_s = clock()
        self._norms: list[float] = []
        self._resume()

    def _resume(self) -> None:
        version = self.rounds.version
        if version:
            self.server.load(self.store.read_state(version), version=version)
        if not self.store.model_path(version).exists():
            self._write_model()
        if self.task.secure is not None and self.rounds.open is not None:
            if self.rounds.open.revealing:
                self._pass("the server was restarted while clients revealed secrets")
            elif self.rounds.poisson is not None:
                self._pass("the server was restarted")
            else:
                self.rounds.abandon("the server was restarted", self.clock())
                self._commit()
        self.store.clean(self.rounds)
        self._seen_s = dict.fromkeys(self.rounds.given, self.clock())

    def join(self, client: str, said: messages.Join) -> messages.Answer:
        """A client is there, or is told why it cannot be."""
        layout = self.task.trainer.layout.fingerprint
        if said.layout != layout or said.strategy != self.strategy:
            what = "model" if said.layout != layout else "[federated], [codec], [privacy], [precision] or run.seed"
            return messages.Refusal(f"client {client} has another {what} than the server: use one run file")
        if client not in self.rounds.present and len(self.rounds.present) >= self.task.federated.clients:
            return messages.Refusal(
                f"client {client} would be one more than federated.clients = {self.task.federated.clients}"
            )
        self.rounds.join(client, said.samples)
        if self.secret is not None:
            self.secret.server.lose(client, self.clock())  # what it knew of this attempt ended with its process
        self.alive(client)
        return messages.Wait(0.0)

    def alive(self, client: str) -> bool:
        """Whether the server knows the client, who has just spoken."""
        if client in self.rounds.present:
            self._seen_s[client] = self.clock()
        return client in self.rounds.present

    def work(self, client: str) -> messages.Answer:
        """Something to train, if there is."""
        if self.rounds.over:
            return messages.Over()
        if not self.alive(client):
            return messages.Refusal("the server does not know this client: join first", join_first=True)
        if self.advancing:
            return messages.Wait(POLL_S)
        ticket = self.rounds.ask(client, self.clock())
        self._commit()
        if self.task.secure is not None:
            self._begin_secret()
            if self.secret is None or not self.secret.wants(client):
                return messages.Wait(POLL_S)
        if ticket is None:
            return messages.Wait(POLL_S)
        self.row.asked += 1
        last, turn = self.rounds.last.get(client), self.rounds.turns.get(client, 0)
        return messages.Train(ticket, turn, last, None if self.secret is None else self.secret.terms)

    def settled(self, ticket: Ticket) -> messages.Ended | None:
        """What became of a contribution; None: nothing yet."""
        one = self.rounds.open
        if ticket in self.rounds.used or ticket in self.rounds.buffer or (one is not None and ticket in one.counted):
            return messages.Ended(True)
        if not self.task.federated.asynchronous and (ticket.version, ticket.number) < self._present():
            return messages.Ended(False, "its round is over")
        return None

    def expected(self, header: messages.UpdateHeader) -> list[messages.Part]:
        """The parts of a plain update with this header. Raises `BadFrame`."""
        if header.width > len(self.task.corners):
            raise messages.BadFrame(f"an update is of width {header.width}, and there are {len(self.task.corners) + 1}")
        upload = self.task.of_width(header.width).upload
        parts = [
            messages.Part(f"update.{i}", str(dtype).removeprefix("torch."), numel)  # type: ignore[arg-type]
            for i, (dtype, numel) in enumerate(upload.fields())
        ]
        control = [messages.part_of("control", self.server.model)] if self.task.federated.sends_control else []
        return parts + control

    def largest(self) -> list[messages.Part]:
        """The parts of the longest plain update."""
        return self.expected(messages.UpdateHeader(samples=1, steps=1))

    def check(self, ticket: Ticket, path: Path, digest: str) -> str | None:
        """Why a whole upload cannot count; None if it can. Reads it all, and changes nothing."""
        if digest_of(path) != digest:
            return f"the upload of client {ticket.client} was changed on the way"
        try:
            update = self._update(ticket, path)
        except messages.BadFrame as error:
            return f"client {ticket.client}: {error}"
        joined = self.rounds.present.get(ticket.client, update.samples)
        if update.samples != joined:
            return f"client {ticket.client} joined with {joined} samples, and now says {update.samples}"
        return refusal(update, self.task.federated, numel=self.task.of_width(update.width).model.numel())

    def refuse(self, ticket: Ticket, sentence: str) -> messages.Answer:
        """An upload cannot count, and its client is named."""
        self.store.drop(ticket)
        self.rounds.refuse(ticket.client)
        self._commit()
        self.told(f"refused: {sentence}")
        return messages.Ended(False, sentence[:1000])

    def count(self, ticket: Ticket, digest: str) -> messages.Answer:
        """An upload that is whole and good counts, if it is not too late. Durable when this returns."""
        size = self.store.part_path(ticket).stat().st_size
        self.store.accept(ticket)
        verdict = self.rounds.contribute(ticket, digest, self.clock())
        self._commit()
        if verdict == "counted":
            self.row.up_bytes += size
            return messages.Ended(True)
        if verdict == "again":
            return messages.Ended(True)
        self.store.drop(ticket)
        self.row.late += 1
        return messages.Ended(False, f"the update is {verdict}")

    def tick(self) -> tuple[Ticket, ...] | None:
        """Lets time pass. Contributions that make the next model, if they are all there: then `compute`, `finish`."""
        now_s = self.clock()
        for client in [c for c in self.rounds.present if now_s - self._seen_s.get(c, now_s) > self.silence_s]:
            self.told(f"client {client} has been silent for {self.silence_s:g} s: nobody waits for it")
            self.rounds.leave(client)
            if self.secret is not None:
                self.secret.server.lose(client, now_s)
        if self.rounds.over or self.advancing:
            return None
        if self.task.secure is None:
            ready = self.rounds.tick(now_s)
            self._commit()
            return ready
        self.rounds.begin(now_s)
        self._commit()
        self._begin_secret()
        if self.secret is not None:
            self.secret.server.tick(now_s)
            self.note_revealing()
            return self._ended_secret(self.secret)
        return None

    def compute(self, ready: tuple[Ticket, ...]) -> None:
        """Makes the next model and its files. Long; nothing else may change the host meanwhile."""
        if self.secret is not None:
            updates = [self.secret.mean(like=self.server.model)]
        else:
            updates = [self._update(ticket, self.store.upload_path(ticket)) for ticket in ready]
            self._norms = norms_of(updates, self.task.federated)
        self.row.values |= self.server.advance(updates)
        version = self.server.version
        if version % self.task.federated.evaluate_every == 0 or version == self.rounds.versions:
            self.row.values |= self.server.measured()
        self._write_model()

    def finish(self, ready: tuple[Ticket, ...]) -> RoundFigures:
        """The model that `compute` has made is the newest."""
        row, one = self.row, self.rounds.open
        row.counted, row.time_s = len(ready), self.clock() - self._began_s
        row.attempts = self.rounds.attempt + 1
        row.lost = 0 if one is None else len(one.cohort) - len(ready)
        if self.budget is not None:
            row.values["privacy/epsilon"] = self.budget.spent(self.server.version)
        self.store.note(asdict(row))
        self.rounds.advance(self.clock(), ready, self._norms)
        self._commit()
        self.secret, self.row = None, RoundFigures(self.rounds.version + 1)
        self.store.clean(self.rounds)
        return row

    def note_revealing(self) -> None:
        """Before anybody is asked for secrets: on the disk."""
        if self.secret is not None and self.secret.server.revealing:
            self.rounds.reveal(self.clock())
            self._commit()

    def close(self) -> None:
        """Lets another server open the folder."""
        self.store.journal.close()

    def clients(self) -> dict[str, list[float]]:
        """Of each client that is there or has counted, by name, its samples (0: it is gone) and the rounds in which it
        counted."""
        names = sorted({*self.rounds.present, *self.rounds.turns})
        return {
            "samples": [self.rounds.present.get(name, 0) for name in names],
            "rounds": [self.rounds.turns.get(name, 0) for name in names],
        }

    def facts(self) -> dict[str, Any]:
        """What a report says beside the rounds."""
        if self.budget is None:
            return {}
        return {"privacy": self.budget.facts(self.server.version)}

    def _begin_secret(self) -> None:
        """Begins the sum of the open round, if it has none."""
        if self.rounds.open is None or self.secret is not None:
            return
        fewest = fewest_in_sum(self.task.federated)
        if self.rounds.poisson is not None and len(self.rounds.open.cohort) < fewest:
            self._pass(f"{len(self.rounds.open.cohort)} of at least {fewest} clients were drawn")
            return
        cohort = {name: self.rounds.present.get(name, 1) for name in self.rounds.open.cohort}
        attempt = self.rounds.open.attempt
        self.secret = SecretRound(self.task, self.rounds.version, attempt, cohort, now_s=self.clock())

    def _ended_secret(self, secret: SecretRound) -> tuple[Ticket, ...] | None:
        if not secret.server.over:
            return None
        for name in sorted(secret.server.liars):
            self.told(f"client {name} sent wrong shares; the sum is exact without them")
        if secret.server.phase == "summed":
            try:
                secret.mean(like=self.server.model)
            except EnvironmentFault as error:
                self._pass(str(error))
                return None
            return tuple(Ticket(name, secret.version, secret.attempt) for name in secret.server.contributors)
        if secret.server.revealing or self.rounds.poisson is not None:
            self._pass(secret.server.reason)
            return None
        self.told(f"round {secret.version + 1} is tried again: {secret.server.reason}")
        self.secret = None
        self.rounds.abandon(secret.server.reason, self.clock())
        self._commit()
        return None

    def _pass(self, reason: str) -> None:
        """The round passes without an update; what it spent of privacy is spent."""
        self.told(f"round {self.rounds.version + 1} passes without an update: {reason}")
        row, one = self.row, self.rounds.open
        row.time_s, row.attempts = self.clock() - self._began_s, self.rounds.attempt + 1
        row.lost = 0 if one is None else len(one.cohort)
        self.server.version += 1
        if self.budget is not None:
            row.values["privacy/epsilon"] = self.budget.spent(self.server.version)
        self._write_model()
        self.store.note(asdict(row))
        self.rounds.advance(self.clock(), ())
        self._commit()
        self.secret, self.row = None, RoundFigures(self.rounds.version + 1)

    def _present(self) -> tuple[int, int]:
        return self.rounds.version, self.rounds.attempt

    def _update(self, ticket: Ticket, path: Path) -> Update:
        """The update in a file. Raises `BadFrame`."""
        read = messages.read_frame(path, messages.UpdateHeader, self.expected)
        header, vectors = read.header, dict(read.vectors)
        task = self.task.of_width(header.width)
        control = vectors.pop("control", None)
        payload = tuple(vectors.values())
        return Update(
            client=ticket.client,
            version=ticket.version,
            samples=header.samples,
            delta=task.upload.decode(payload, client=ticket.client, version=ticket.version),
            steps=header.steps,
            momentum=header.momentum,
            cluster=header.cluster,
            width=header.width,
            control=control,
            metrics=header.metrics,
            chance=self.rounds.chance_of(ticket.client),
        )

    def _write_model(self) -> None:
        corners = [corner.where for corner in self.task.corners]
        self.store.write_model(self.server.version, self.server.state(), self.server.plan(), corners)

    def _commit(self) -> None:
        made = self.rounds.decisions()
        if made:
            self.store.journal.append(made)


def strategy_of(task: Task) -> str:
    """What both ends must agree on beside the model, in one line."""
    coded, dtype = task.upload.codec.__class__.__name__, task.upload.dtype
    parts = (task.federated, coded, dtype, task.privacy, task.secure is None, task.seed)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
