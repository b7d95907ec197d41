"""`shoal coordinator`: membership as a service, and what an operator asks of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.arguments import AsJson
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.resilience.events import Event, View

app = typer.Typer(no_args_is_help=True, help="Decides which replicas train together; survives its own restart.")

Where = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the coordinator listens.")]
Token = Annotated[Path, typer.Option("--token", metavar="FILE", help="The job's token.")]
Authorities = Annotated[
    Path | None, typer.Option("--authorities", metavar="PEM", help="Trusted authorities; beyond loopback.")
]
Replica = Annotated[str, typer.Argument(help="Its name, as `view` shows it.")]


@app.command()
def serve(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="The file that survives a restart.")],
    token: Annotated[Path, typer.Option("--token", metavar="FILE", help="The job's token; written if missing.")],
    minimum: Annotated[int, typer.Option("--min", help="Fewest replicas that train.", min=1)] = 1,
    maximum: Annotated[int, typer.Option("--max", help="Most replicas that train; more stand by.", min=1)] = 1,
    address: Annotated[str, typer.Option(help="Where to listen; beyond loopback only with a certificate.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 0,
    silence: Annotated[float, typer.Option(help="Seconds without a heartbeat after which a rank is lost.", min=1)] = 5,
    accept: Annotated[float, typer.Option(help="Seconds that a replica may need to the end of its step.", min=1)] = 300,
    hang: Annotated[
        float, typer.Option(help="Seconds for which a rank may keep others waiting without progress; 0: ever.", min=0)
    ] = 45,
    start: Annotated[float, typer.Option(help="Seconds to wait for all replicas at the start.", min=0)] = 60,
    certificate: Annotated[Path | None, typer.Option(metavar="PEM", help="The coordinator's certificate.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its key.")] = None,
    as_json: AsJson = False,
) -> None:
    """Listens until Ctrl-C, and says where. The journal makes it go on where it was when it is started again.

    Example: shoal coordinator serve job.journal --token job.token --min 2 --max 4 --port 29400
    """
    from shoal.coordinator.service import serve
    from shoal.errors import UsageError
    from shoal.resilience.membership import Rules

    def listening(host: str, number: int) -> None:
        where = {"address": host, "port": number, "journal": str(journal), "token": str(token)}
        answer(json.dumps(where) if as_json else f"The coordinator listens on {host}:{number}")

    try:
        rules = Rules(minimum, maximum, silence_s=silence, accept_s=accept, start_s=start, hang_s=hang)
    except ValueError as error:
        raise UsageError(str(error)) from error
    serve(
        rules,
        address=address,
        port=port,
        journal=journal,
        token=token,
        certificate=certificate,
        key=key,
        listening=listening,
    )
    print(f"The coordinator has stopped; started again with {journal}, it goes on where it was", file=sys.stderr)


@app.command()
def view(where: Where, token: Token, authorities: Authorities = None, as_json: AsJson = False) -> None:
    """Shows the present generation.

    Example: shoal coordinator view 127.0.0.1:29400 --token job.token
    """
    import msgspec

    from shoal.resilience.events import Look

    found = _ask(where, token, authorities, Look())
    if as_json:
        answer(json.dumps(msgspec.to_builtins(found)))
        return
    print(f"generation {found.generation}, step {found.committed}: {', '.join(found.members) or 'no members yet'}")
    if found.number > found.generation:
        print(f"generation {found.number} is about to be formed")


@app.command()
def scale(where: Where, replicas: int, token: Token, authorities: Authorities = None) -> None:
    """Sets how many replicas train, from the next generation on.

    Example: shoal coordinator scale 127.0.0.1:29400 3 --token job.token
    """
    from shoal.resilience.events import Scale

    _ask(where, token, authorities, Scale(replicas))


@app.command()
def expel(where: Where, replica: Replica, token: Token, authorities: Authorities = None) -> None:
    """Fences a replica: it takes no step any more, and the others go on.

    Example: shoal coordinator expel 127.0.0.1:29400 host7-1 --token job.token
    """
    from shoal.resilience.events import Expel

    _ask(where, token, authorities, Expel(replica, "an operator expelled it"))


@app.command()
def ended(where: Where, replica: Replica, token: Token, authorities: Authorities = None) -> None:
    """Says that no process of a replica is left, where its host died and nobody else can say so.

    Example: shoal coordinator ended 127.0.0.1:29400 host7-1 --token job.token
    """
    from shoal.resilience.events import Ended

    _ask(where, token, authorities, Ended(replica, "an operator says that its processes ended"))


def _ask(where: str, token: Path, authorities: Path | None, event: Event) -> View:
    """Sends one event; the view after it. Raises `UsageError` where it is refused."""
    from shoal.coordinator.client import Address, Connection
    from shoal.errors import EnvironmentFault, UsageError
    from shoal.launcher.handshake import read_token
    from shoal.resilience.events import Look, Refusal, View

    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"'{where}' is no address: it is HOST:PORT, as `shoal coordinator serve` prints it")
    trusted = str(authorities) if authorities is not None else None
    try:
        connection = Connection(Address(host.strip("[]"), int(port), read_token(token), trusted))
        answers = [connection.ask(event), connection.ask(Look())]
        connection.close()
    except OSError as error:
        raise EnvironmentFault(f"the coordinator at {where} does not answer ({error}): is it running?") from error
    if isinstance(answers[0], Refusal):
        raise UsageError(answers[0].sentence)
    assert isinstance(answers[1], View)
    return answers[1]
