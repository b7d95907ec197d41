"""A client over the network: joins, trains what it is given, uploads, and goes on where it was after any interruption.

The server may be away for `patience_s`. An upload that breaks goes on where it broke; an update that the server has
counted already is not sent again. While a client trains, it says every few seconds that it is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from blake3 import blake3

from shoal.errors import EnvironmentFault, MissingExtra, UsageError
from shoal.federated.client_data import ClientData
from shoal.federated.secure.client import ProtocolBroken, SecureClient
from shoal.federated.secure.messages import Roster, Sealed, Survivors
from shoal.federated.secure.summing import (
    Quantiser,
    clipped_part,
    encoded,
    fewest_in_sum,
    largest_norm_of,
    noise_of_clients,
)
from shoal.federated.simulation import local_mask
from shoal.federated.strategy import RoundPlan, Update
from shoal.federated.task import Task
from shoal.federated.transport import messages
from shoal.federated.transport.host import session_of, strategy_of
from shoal.federated.transport.store import ClientStore
from shoal.federated.work import ClientState, ClientWork, LocalRound

try:
    import aiohttp
except ImportError as error:
    raise MissingExtra("aiohttp", extra="federated", purpose="federated training over the network") from error

Taken = TypeVar("Taken")

HEARTBEAT_S = 3.0
REQUEST_S = 60.0
CHUNK_BYTES = 1 << 20


class Client:
    """`name` is that on the certificate. `width`: the number of the width at which it trains. `told` hears a line for
    each contribution."""

    def __init__(
        self,
        task: Task,
        data: ClientData,
        *,
        name: str,
        url: str,
        store: ClientStore,
        width: int = 0,
        patience_s: float = 60.0,
        told: Callable[[str], object] = str,
    ) -> None:
        whole, task = task, task.of_width(width)
        self.task, self.data, self.name, self.store, self.told = task, data, name, store, told
        self._url, self._patience_s = url, patience_s
        self._strategy = task.strategy()
        self._local = local_mask(task)
        self._width, self._layout = width, whole.trainer.layout.fingerprint
        self._heard_s = 0.0  # when a byte of the server was last read; 0: never

    async def run(self, tls: ssl.SSLContext) -> None:
        """Takes part until the run is over. Raises `EnvironmentFault` and `UsageError`."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=REQUEST_S)
        async with aiohttp.ClientSession(
            timeout=timeout,
            connector=aiohttp.TCPConnector(ssl=tls, limit=2),
            auto_decompress=False,
            read_bufsize=CHUNK_BYTES,
        ) as session:
            self._session = session
            await self._join()
            heart = asyncio.create_task(self._beat())
            try:
                while not isinstance(answer := await self._ask("POST", "/work"), messages.Over):
                    await self._take(answer)
            finally:
                heart.cancel()

    async def _take(self, answer: Any) -> None:
        if isinstance(answer, messages.Train):
            await self._contribute(answer)
        elif isinstance(answer, messages.Wait):
            await asyncio.sleep(answer.seconds)
        elif isinstance(answer, messages.Refusal) and answer.join_first:
            await self._join()
        else:
            raise UsageError(f"the server refuses client {self.name}: {getattr(answer, 'sentence', answer)}")

    async def _join(self) -> None:
        said = messages.Join(len(self.data), self._layout, strategy_of(self.task))
        answer = await self._ask("POST", "/join", said)
        if isinstance(answer, messages.Refusal):
            raise UsageError(f"the server refuses client {self.name}: {answer.sentence}")

    async def _contribute(self, train: messages.Train) -> None:
        ticket = train.ticket
        state = self.store.state(turn=train.turn, last=train.last)
        model = await self._model(ticket.version)
        if model is None:
            return  # the round is over
        beside = {name: model.vectors.get(name) for name in ("control", "others")}
        plan = RoundPlan(model.header.pull, settings=model.header.settings, **beside)
        work = ClientWork(ticket, self.data, state)
        update, after = await asyncio.to_thread(self._trained, model, plan, work)
        self.store.keep(ticket, after)
        ended = await (self._upload(update, train) if train.secret is None else self._in_secret(update, train))
        if ended.counted:
            figures = "".join(f", {name} {value:.4f}" for name, value in update.metrics.items())
            self.told(f"round {ticket.version + 1}: counted{figures.replace('/train', '')}")
        else:
            self.told(f"round {ticket.version + 1}: not counted, {ended.reason or 'its round is over'}")
            if ended.reason.startswith(("client ", "the update of ", "the upload of ")):
                await asyncio.sleep(1.0)  # the server will not take the same again in this round

    def _trained(self, model: messages.Frame, plan: RoundPlan, work: ClientWork) -> tuple[Update, ClientState]:
        vector = model.vectors["model"].clone()
        return LocalRound(self.task, self._strategy, vector, plan, self._local).train([work])[0]

    async def _model(self, version: int) -> messages.Frame[messages.ModelHeader] | None:
        """The model of a version; what is there of it is not fetched again. None: it is gone."""
        path = self.store.model_path(version)

        def rest() -> dict[str, str]:
            return {"Range": f"bytes={path.stat().st_size if path.exists() else 0}-"}

        async def fetch(response: aiohttp.ClientResponse) -> bool:
            if response.status in (200, 206):
                with path.open("ab" if response.status == 206 else "wb") as file:
                    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                        file.write(chunk)
                        self._heard_s = time.monotonic()
            return response.status != 404

        while True:
            if not await self._exchange("GET", f"/model/{version}/{self._width}", fetch, headers=rest):
                return None
            with contextlib.suppress(messages.BadFrame):
                read = messages.read_frame(path, messages.ModelHeader)
                if read.vectors["model"].shape == self.task.model.shape:
                    return read
            path.unlink(missing_ok=True)

    async def _upload(self, update: Update, train: messages.Train) -> messages.Ended:
        named = {f"update.{i}": vector for i, vector in enumerate(update.payload)}
        if update.control is not None:
            named["control"] = update.control
        header = messages.UpdateHeader(
            parts=tuple(messages.part_of(name, vector) for name, vector in named.items()),
            samples=update.samples,
            steps=update.steps,
            momentum=update.momentum,
            cluster=update.cluster,
            width=self._width,
            metrics={name: value for name, value in update.metrics.items() if abs(value) <= messages.MOST_FIGURE},
        )
        pieces = [messages.frame_head(header), *map(messages.bytes_of, named.values())]
        return await self._sent(train, pieces)

    async def _sent(self, train: messages.Train, pieces: list[Any]) -> Any:
        """Uploads `pieces` one behind the other, from where the server has them; what became of it."""
        digest, total = blake3(), sum(map(len, pieces))
        for piece in pieces:
            digest.update(piece)
        where = f"/upload/{train.ticket.version}/{train.ticket.number}"
        while True:
            known = await self._ask("GET", where)
            if not isinstance(known, messages.Received):
                return known
            query = f"?offset={known.size}&total={total}&digest={digest.hexdigest()}"
            try:
                answer = await self._ask("PUT", where + query, body=lambda at=known.size: _from(pieces, at))
            except EnvironmentFault:
                if await self._ask("GET", where) == known:  # nothing has come through
                    raise
                continue
            if isinstance(answer, messages.Ended | messages.Wait):
                return answer
            if isinstance(answer, messages.Refusal):
                return messages.Ended(False, answer.sentence)

    async def _in_secret(self, update: Update, train: messages.Train) -> messages.Ended:
        """Takes the four phases of secure aggregation."""
        ticket, terms, secure = train.ticket, train.secret, self.task.secure
        if terms is None or secure is None or (terms.bits, terms.clip) != (secure.bits, secure.clip):
            raise UsageError("the server's [secure_aggregation] is not that of this run file: use one run file")
        cut = clipped_part(update, secure)
        if cut > 0:
            self.told(f"{cut:.2%} of the numbers were cut to secure_aggregation.clip = {secure.clip:g}")
        noise = noise_of_clients(self.task.privacy, secure, self.task.federated, numel=self.task.model.numel())
        quantiser = Quantiser(terms.bits, terms.clip, terms.most_weight, noise)
        norm = largest_norm_of(self.task.privacy)
        vector = encoded(update, quantiser, self.task.federated, largest_norm=norm)
        session = session_of(self.task.seed, ticket.version, ticket.number)
        least = fewest_in_sum(self.task.federated)
        try:
            return await self._phases(SecureClient(self.name, session, least=least), vector, train)
        except ProtocolBroken as error:
            self.told(str(error))
            return messages.Ended(False, "this client left the round")

    async def _phases(self, secure: SecureClient, vector: np.ndarray, train: messages.Train) -> messages.Ended:
        where = f"/secret/{train.ticket.version}/{train.ticket.number}"
        said: msgspec.Struct = secure.keys()
        while True:
            match await self._ask("POST", where, said):
                case messages.Ended() as ended:
                    return ended
                case Roster() as roster:
                    said = secure.shares(roster)
                case Sealed() as sealed:
                    masked = await asyncio.to_thread(secure.masked, sealed, vector)
                    sent = await self._masked(masked, train)
                    if isinstance(sent, messages.Ended):
                        return sent
                    said = messages.Look()
                case Survivors() as survivors:
                    said = secure.revealed(survivors)
                case messages.Wait(seconds=seconds):
                    await asyncio.sleep(seconds)
                    said = messages.Look()
                case messages.Refusal(sentence=sentence):
                    return messages.Ended(False, sentence)
                case other:
                    raise EnvironmentFault(f"the server answered {type(other).__name__} in secure aggregation")

    async def _masked(self, masked: np.ndarray, train: messages.Train) -> Any:
        tensor = torch.from_numpy(masked)
        header = messages.UpdateHeader(parts=(messages.part_of("masked", tensor),), samples=1, steps=1)
        return await self._sent(train, [messages.frame_head(header), messages.bytes_of(tensor)])

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._session.post(self._url + "/alive"):
                    pass

    async def _ask(self, method: str, where: str, said: Any = None, *, body: Callable[[], Any] | None = None) -> Any:
        """The server's answer to a message. Raises `EnvironmentFault` where it is away for too long."""
        content = body or (lambda: b"" if said is None else msgspec.msgpack.encode(said))

        async def read(response: aiohttp.ClientResponse) -> Any:
            whole = await messages.body_of(response.content, most=messages.MOST_MESSAGE_BYTES)
            return messages.decode(messages.ANSWER, whole)

        return await self._exchange(method, where, read, content=content)

    async def _exchange(
        self,
        method: str,
        where: str,
        take: Callable[[aiohttp.ClientResponse], Awaitable[Taken]],
        *,
        content: Callable[[], Any] = bytes,
        headers: Callable[[], dict[str, str]] = dict,
    ) -> Taken:
        """What `take` makes of a response that is no 503 and is read to its end, after as many tries as `patience_s`
        allows without a byte from the server. `content` and `headers` are asked anew for each try."""
        began_s, pause_s = time.monotonic(), 0.1
        while True:
            try:
                async with self._session.request(
                    method, self._url + where, data=content(), headers=headers()
                ) as response:
                    self._heard_s = self._heard_s or time.monotonic()
                    if response.status != 503:
                        return await take(response)
                reason = "it is busy"
            except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError, ssl.SSLError) as error:
                raise EnvironmentFault(
                    f"{self._url} is not a server of this run ({error}): check the address"
                ) from error
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
                if "alert" in reason.lower():
                    raise EnvironmentFault(
                        f"{self._url} refuses the certificate of client {self.name} ({reason}): enrol it with the "
                        "authority of that server"
                    ) from error
            if time.monotonic() - max(began_s, self._heard_s) > self._patience_s:
                knows = "" if self._heard_s else f", and is the certificate of client {self.name} of its authority"
                raise EnvironmentFault(
                    f"{self._url} has not answered for {self._patience_s:g} s ({reason}): is the server running{knows}?"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)


async def _from(pieces: list[Any], start: int) -> AsyncIterator[bytes | memoryview]:
    """The bytes of `pieces` from `start` on, in chunks."""
    for piece in pieces:
        first = min(start, len(piece))
        start -= first
        for at in range(first, len(piece), CHUNK_BYTES):
            yield piece[at : at + CHUNK_BYTES]
