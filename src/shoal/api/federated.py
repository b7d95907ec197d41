"""`shoal.federate`: a federated run from a script, with its own model, data, training and evaluation."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api import Configuration, _is_for_another_call, _resolved, _run_ranks
from shoal.assembly.start import RANK
from shoal.errors import UsageError
from shoal.federated.config import FederatedClient
from shoal.launcher.own_script import EXPECTS
from shoal.runfile.run_file import RunFile, run_directory

if TYPE_CHECKING:
    from shoal.assembly.federated import FromScript


@dataclass(frozen=True)
class FederatedServer:
    """Serve the rounds over TLS at `address`:`port` (0: any free port); `certificates` is the folder that
    `shoal federate enrol` made.
    """

    certificates: str | Path
    address: str = "127.0.0.1"
    port: int = 0


def federate(
    config: Configuration,
    overrides: Sequence[str] = (),
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
    train: Callable[..., Any] | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    strategy: Any = None,
    role: FederatedServer | FederatedClient | None = None,
) -> dict[str, Any] | None:
    """Play all rounds of a federated run in this process, and return its report; or be its server, or one client.

    `config`, `model`, `data` and `loss` are those of `shoal.train`, with a table `[federated]`. `train` takes the place
    of a client's local steps: called as train(model, samples, round=number, lr=rate) with the model of the round and
    the client's samples, it trains the model where it stands, by any optimizer; what it returns are figures by name, of
    which "steps" counts local steps. `evaluate` is called with the model after a round, at the server, and returns
    figures by name. `strategy` takes the place of `federated.kind`: a subclass of `shoal.federated.strategy.Strategy`,
    or a strategy of Flower (`pip install -e '.[flower]'`), whose client app may be `train`, both unchanged.

    With `federated.kind = "heterofl"`, `model` is a function with an argument `width`, the part of the whole width.

    `role`: None simulates all clients here. A client returns None when the run is over; with `run.processes` or
    `[layout]`, it is as many ranks, each of which runs this script up to the call: what earlier calls reported is read
    from their run directories. Raises `ShoalError`: a wrong key, a strategy that an own `train` cannot follow, a server
    that is away.
    """
    from shoal.assembly.federated import FromScript, serve, simulate
    from shoal.assembly.federated_client import client_directory
    from shoal.assembly.objects import UserObjects
    from shoal.federated.task import OwnTraining

    os.environ.pop(EXPECTS, None)
    run_file, file = _resolved(config, overrides, model=model, data=data, loss=loss)
    if run_file.federated is None:
        raise UsageError('the configuration has no table [federated]: add it, with a strategy such as kind = "fedavg"')
    client = role if isinstance(role, FederatedClient) else None
    directory = run_directory(run_file) if client is None else client_directory(run_file, client)
    if _is_for_another_call(directory, str(directory.resolve()), data):
        return _report_in(directory) if client is None else None
    if _of_flower(train):
        from shoal.federated.flower import client_of

        assert train is not None
        train = client_of(train, run_file.federated.clients, part=None if client is None else client.part)
    own = OwnTraining(train, evaluate, None if strategy is None else _strategy(strategy))
    script = FromScript(UserObjects(model=model, data=data, loss=loss), own)
    if role is None:
        return simulate(run_file, told=_say, script=script)
    if isinstance(role, FederatedServer):
        return serve(
            run_file,
            certificates=Path(role.certificates),
            address=role.address,
            port=role.port,
            listening=lambda number: _say(f"The server listens on {role.address}:{number}"),
            told=_say,
            script=script,
        )
    _be_client(run_file, role, script, file=file)
    return None


def _be_client(run_file: RunFile, client: FederatedClient, script: FromScript, *, file: str) -> None:
    """In this process, or with ranks that run the same script up to this call."""
    from shoal.assembly.federated_client import CLIENT, client_directory, replica_of, take_part, take_part_as_rank

    def told(line: str) -> None:
        _say(f"{client.name}: {line}")

    replica = replica_of(run_file, client, script)
    if replica is None:
        take_part(run_file, client, told=told, script=script)
        return
    directory = client_directory(run_file, client)
    _run_ranks(
        replica,
        lambda sized, place: take_part_as_rank(run_file, client, sized, place, told=told, script=script),
        directory=directory,
        file=file,
        wanted=str(directory.resolve()),
        imports=RANK,
        patience=CLIENT,
    )


def _report_in(directory: Path) -> dict[str, Any]:
    """The report of a run that the script, whose ranks run it again up to a later call, has played before."""
    from shoal.federated.report import REPORT

    if not (directory / REPORT).is_file():
        raise UsageError(
            f"a rank came to a federated run whose report is not in {directory}: ranks run the script up to their "
            "own call; what leads to it must not depend on time or chance"
        )
    return json.loads((directory / REPORT).read_text(encoding="utf-8"))


def _of_flower(given: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "flwr" for kind in type(given).__mro__)


def _strategy(given: Any) -> Callable[[Any, Any], Any]:
    """What builds the strategy from `[federated]` and the trainer of the clients."""
    from shoal.federated.strategy import Strategy

    if _of_flower(given):
        from shoal.federated.flower import FlowerStrategy

        return lambda config, trainer: FlowerStrategy(config, trainer, given)
    if isinstance(given, type) and issubclass(given, Strategy):
        return lambda config, trainer: given(config, trainer.layout.numel)
    raise UsageError(
        f"strategy = {given!r}: give a subclass of shoal.federated.strategy.Strategy, or one of Flower's strategies"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
