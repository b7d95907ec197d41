"""`shoal federate`: many owners train one model, simulated here or over the network."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.arguments import AsJson, Overrides
from shoal.observe.busy import busy
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.runfile.run_file import RunFile

app = typer.Typer(no_args_is_help=True, help="Trains one model with many owners of data, who keep it.")

RunFileArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file with a table [federated].")]


@app.command()
def simulate(run_file: RunFileArgument, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Plays all rounds with simulated clients, in simulated time; leaves a report and the model.

    Example: shoal federate simulate recipes/federated-digits.toml federated.kind=scaffold
    """
    loaded = _load(run_file, overrides)
    from shoal.assembly.federated import simulate

    with _said_by_lines(as_json) as show:
        result = simulate(loaded, told=show)
    if as_json:
        answer(json.dumps(result))


def _load(run_file: Path, overrides: list[str] | None) -> RunFile:
    """A run file of rounds, refused where it is wrong before anything imports torch. Raises `ConfigError`."""
    from shoal.errors import ConfigError
    from shoal.runfile.federated_rules import NO_TABLE
    from shoal.runfile.load import load_run

    loaded = load_run(run_file, overrides or ())
    if loaded.federated is None:
        raise ConfigError(NO_TABLE)
    return loaded


@contextmanager
def _said_by_lines(as_json: bool) -> Iterator[Callable[[str], None]]:
    """What prints a line. Before the first one, a wait is explained."""
    with ExitStack() as preparing:
        preparing.enter_context(busy("building the model and opening the data"))

        def show(line: str) -> None:
            preparing.close()
            print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

        yield show


Certificates = Annotated[
    Path, typer.Option("--certificates", metavar="FOLDER", help="Where `shoal federate enrol` wrote them.")
]


@app.command()
def enrol(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where certificates are; made if missing.")],
    clients: Annotated[str, typer.Option(help="Names of clients, several with commas.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens with which so many clients enrol by themselves.", min=0)] = 0,
    hours: Annotated[float, typer.Option(help="For how long tokens are good.", min=0.01)] = 24.0,
    hosts: Annotated[str, typer.Option(help="Names and addresses of the server.")] = "localhost,127.0.0.1",
    days: Annotated[int, typer.Option(help="For how long certificates are good.", min=1, max=3650)] = 365,
) -> None:
    """Makes certificates: of an authority and the server where there are none, and of each client. And tokens, with
    which clients get certificates from a server with --enrol.

    Example: shoal federate enrol certificates --clients clinic-a,clinic-b
    """
    from shoal.federated.transport.enrol import AUTHORITY, enrol, new_tokens

    names = [name for name in clients.split(",") if name]
    for path in enrol(folder, names=names, hosts=[host for host in hosts.split(",") if host], days=days):
        print(f"{path.stem}: give it {path}, {path.with_suffix('.key')} and {folder / AUTHORITY}.pem")
    for token in new_tokens(folder, count=tokens, hours=hours) if tokens else ():
        print(f"token {token}: give it and {folder / AUTHORITY}.pem to one client, for {hours:g} hours")


@app.command()
def join(
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="A server that runs with --enrol.")],
    certificates: Annotated[
        Path, typer.Option("--certificates", metavar="FOLDER", help="Has authority.pem; gets key and certificate.")
    ],
    name: Annotated[str, typer.Option(help="What this client is to be called.")],
    token: Annotated[str, typer.Option(help="From whoever runs the server; good once.")],
) -> None:
    """Gets a certificate for this client, whose key is made here and stays here.

    Example: shoal federate join --server 127.0.0.1:29500 --certificates certificates --name clinic-c --token TOKEN
    """
    from shoal.federated.transport.enrol import enrol_by_token

    print(enrol_by_token(certificates, server=server, name=name, token=token))


@app.command()
def server(
    run_file: RunFileArgument,
    certificates: Certificates,
    overrides: Overrides = None,
    address: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 0,
    enrol: Annotated[bool, typer.Option("--enrol", help="Clients with tokens get certificates here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serves all rounds to clients that have certificates, and says where it listens. Started again, it goes on.

    Example: shoal federate server recipes/federated-digits.toml --certificates certificates --port 29500
    """
    loaded = _load(run_file, overrides)
    from shoal.assembly.federated import serve

    with _said_by_lines(as_json) as show:
        result = serve(
            loaded,
            certificates=certificates,
            address=address,
            port=port,
            listening=lambda number: show(f"The server listens on {address}:{number}"),
            told=show,
            enrolment=enrol,
        )
    if as_json:
        answer(json.dumps(result))


@app.command()
def client(
    run_file: RunFileArgument,
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server listens.")],
    certificates: Certificates,
    name: Annotated[str, typer.Option(help="Whose certificate this client shows.")],
    overrides: Overrides = None,
    part: Annotated[
        int | None, typer.Option(min=0, help="Train on this part of the data alone, as [partition] cuts it.")
    ] = None,
    width: Annotated[
        float, typer.Option(help='The width of this client\'s model, one of federated.widths (kind = "heterofl").')
    ] = 1.0,
    patience: Annotated[float, typer.Option(help="Seconds for which the server may be away.", min=0)] = 60.0,
    ranks: Annotated[
        int | None, typer.Option("-n", min=1, help="Ranks that are this client, as run.processes=N says it.")
    ] = None,
) -> None:
    """Trains on this machine's data until the run is over; the data stays here. With several ranks, by run.processes or
    [layout], they are one client, which splits the model as the run file says.

    Example: shoal federate client recipes/federated-digits.toml --server 127.0.0.1:29500 --certificates certificates
    --name clinic-a

    Example: shoal federate client recipes/federated-digits.toml layout.shard=2 --server 127.0.0.1:29500
    --certificates certificates --name clinic-b
    """
    from shoal.errors import UsageError
    from shoal.federated.config import FederatedClient
    from shoal.launcher.environment import ALONE, place_from
    from shoal.runfile.federated_rules import require_client
    from shoal.runfile.load import load_run

    keys = [*(overrides or ()), *([] if ranks is None else [f"run.processes={ranks}"])]
    loaded = load_run(run_file, keys)
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"'{server}' is no address: it is HOST:PORT, as `shoal federate server` prints it")
    one = FederatedClient(server, certificates, name, part=part, width=width, patience_s=patience)
    require_client(loaded, one, (place_from(os.environ) or ALONE).world_size)
    from shoal.assembly.federated_client import CLIENT, client_directory, replica_of, take_part, take_part_as_rank

    def show(line: str) -> None:
        print(f"{name}: {line}", flush=True)

    replica = replica_of(loaded, one)
    if replica is None:
        take_part(loaded, one, told=show)
        return
    from shoal.assembly.start import run
    from shoal.planning.arrange import PLANNER

    options = [f"--server={server}", f"--certificates={certificates}", f"--name={name}", f"--width={width}"]
    options += [f"--patience={patience}", *([] if part is None else [f"--part={part}"])]
    code = run(
        replica,
        [sys.executable, "-m", "shoal", "federate", "client", str(run_file), *keys, *options],
        lambda sized, place: take_part_as_rank(loaded, one, sized, place, told=show),
        directory=client_directory(loaded, one),
        file=str(run_file),
        patience=CLIENT,
        planner=PLANNER,
    )
    raise typer.Exit(code)
