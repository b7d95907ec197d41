"""What verbs share: arguments and options, files that they write, and help that is grouped."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from shoal.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    from shoal.launcher.lab.lab_file import Lab
    from shoal.runfile.run_file import RunFile


# Arguments and options that several verbs have, and files that a verb writes, checked before it works for them.


RunFileArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the file's.")]
ScriptOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]... [ARGS]...", help="Keys of the run; after --, a script's arguments."),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="C.toml", help="The machine; default: layout.cluster, else CPU cores."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]

PICTURES = (".png", ".svg", ".pdf")


def output_file(path: Path | None) -> Path | None:
    """A callback of options: `path`, where a file can be written. Raises `typer.BadParameter` or `EnvironmentFault`."""
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {folder}; make it, or give another")
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise EnvironmentFault(f"{path} cannot be written there: make {folder} writable, or give another place")
    return path


def output_folder(path: Path | None) -> Path | None:
    """A callback of options: `path`, where it is a folder or can become one. Raises `typer.BadParameter`."""
    if path is not None and path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file; give the name of a folder")
    return path


def picture_file(path: Path | None) -> Path | None:
    """As `output_file`, for what is drawn."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise typer.BadParameter(
            f"{path}: a picture is written as {', '.join(PICTURES)}; give it one of these suffixes"
        )
    return output_file(path)


# The list of verbs that `--help` shows.


ELSEWHERE = {
    "resume": "shoal train with what it was started with, which resumes",
    "run": "shoal train",
    "runs": "shoal watch runs/*, a page of all runs there, and shoal report of one",
    "eval": "shoal evaluate",
    "compare": "shoal diff of two runs, and shoal checkpoint diff of two checkpoints",
    "dashboard": "shoal watch, a live page of a run",
    "help": "shoal --help, and shoal VERB --help",
    "stop": "Ctrl-C where a run was started, which saves first, and shoal submit cancel for a job",
    "version": "shoal --version",
}
"""Verbs of other systems, and what they are here."""


def _called(ctx: Any) -> str:
    """How the group of `ctx` is called, whatever has started this process."""
    return "shoal" if ctx.parent is None else f"{_called(ctx.parent)} {ctx.info_name}"


NoSuchOption = import_module(typer.BadParameter.__module__).NoSuchOption
"""Of click, or of the copy of it that newer releases of typer have."""


def meant_by_option(option: str, given: Sequence[str], *, command: str) -> str | None:
    """A sentence for the option that a verb does not have, among what was `given` to `command`, the verb first: a key
    that was written with dashes, or an option of the script's own. None where it is neither.
    """
    from shoal.config.check import places_of
    from shoal.runfile.run_file import RunFile

    place = next((i for i, one in enumerate(given) if one.partition("=")[0] == option), None)
    if place is None:
        return None
    no_option = f"{option} is no option of {command} {given[0]}"
    script = next((one for one in given[:place] if one.endswith(".py")), None)
    name = option.lstrip("-").replace("-", "_")
    keys = [name] if "." in name else places_of(name, RunFile) if script is None else []
    if keys:
        follows = given[place + 1 : place + 2]
        value = given[place].partition("=")[2] or next((one for one in follows if not one.startswith("-")), "VALUE")
        return f"{no_option}; keys of the run stand without dashes: {' or '.join(f'{key}={value}' for key in keys)}"
    if script is None:
        return None
    moved = shlex.join([*given[:place], "--", *given[place:]])
    return f"{no_option}; options of {script} itself stand behind --: {command} {moved}"


def inner_verbs(command: Any) -> Container[str]:
    """The verbs of a group, none of a verb."""
    return getattr(command, "commands", {})


class Verbs(TyperGroup):
    """A list of verbs with their whole first paragraph, which click would cut at 45 characters.

    Ctrl-C in a verb that has no other answer to it ends the verb with a sentence, and the code of the signal.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb that the command line names. Of an option that it does not have, `UsageError` says what it is
        where that is known.
        """
        given = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except NoSuchOption as error:
            if (found := meant_by_option(error.option_name, given, command=_called(ctx))) is None:
                raise
            raise UsageError(found) from None
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # a word of the library that typer asks
            raise
        except KeyboardInterrupt:
            verb = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
            print(f"{verb}: interrupted before its end; the same command starts it again", file=sys.stderr)
            raise typer.Exit(128 + signal.SIGINT) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that `args` begin with. Of one that is none, but a group's or another system's, `UsageError` says
        what is meant here.
        """
        if args and self.get_command(ctx, args[0]) is None:
            groups = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
            meant = [f"shoal {name} {args[0]}" for name, one in groups if args[0] in inner_verbs(one)]
            meant += [ELSEWHERE[args[0]]] if args[0] in ELSEWHERE else []
            meant += [f"shoal train {args[0]}"] if args[0].endswith((".toml", ".py")) else []
            if meant:
                raise UsageError(f"there is no verb {args[0]!r}; there is {', '.join(meant)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list; called for `--help`."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        texts = {name: (verb.help or "").partition("\n\n")[0] for name, verb in verbs if verb and not verb.hidden}
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in texts.items()])


# A script in the place of a run file: `shoal train mine.py`, and so for submit, profile and rehearse.
#
# The script is run up to its first call of `shoal.train` or `shoal.start`, which says what run it is. Keys of the
# command line reach that call by a variable; what is no key is an argument of the script.


@dataclass(frozen=True)
class ScriptTarget:
    """A script, with its own `arguments` and the `keys` of the command line; `run_file` is that of its run."""

    file: Path
    arguments: tuple[str, ...]
    keys: tuple[str, ...]
    run_file: RunFile

    @property
    def command(self) -> list[str]:
        """What runs it here."""
        return [sys.executable, str(self.file), *self.arguments]

    @property
    def environ(self) -> dict[str, str]:
        """The variable that tells it the keys; nothing where there are none."""
        from shoal.launcher.own_script import KEYS

        return {KEYS: json.dumps(self.keys)} if self.keys else {}


def command_of_script(file: Path, given: Sequence[str]) -> ScriptTarget | None:
    """The script that `file` is, with what was `given` behind it; None for a run file. Raises `UsageError` where it is
    missing, `UserCodeError` where it makes no call of Shoal, and what the script raises.
    """
    if file.suffix != ".py":
        return None
    from shoal.launcher.own_script import divided, run_file_of_script

    require_script(file)
    keys, arguments = divided(given)
    before = sys.argv
    try:
        found = run_file_of_script([sys.executable, str(file), *arguments], keys, os.environ)
    finally:
        sys.argv = before
    return ScriptTarget(file, tuple(arguments), tuple(keys), found)


_RELATIVE = re.compile(r"^[ \t]*from[ \t]+\.[\w.]*[ \t]+import[^\n]*", re.MULTILINE)


def require_script(file: Path) -> None:
    """Raises `UsageError` where the script is missing, is a part of a package, or a file beside it hides one."""
    from shoal.files import meant
    from shoal.installation import hidden_package

    if not file.is_file():
        raise UsageError(
            f"{file} is missing{meant(file)}: give a script that calls shoal.train or shoal.start, or a run file"
        )
    _require_no_package(file)
    if (hidden := hidden_package([str(file.resolve().parent), *sys.path])) is not None:
        raise UsageError(hidden)


def _require_no_package(file: Path) -> None:
    """Raises `UsageError` for relative imports, which a module of a package may have and a script may not."""
    lines, package = _RELATIVE.findall(file.read_text(encoding="utf-8", errors="replace")), file.resolve().parent
    if lines and (package / "__init__.py").is_file():
        raise UsageError(
            f"{file} imports from its package ({lines[0].strip()}), and a script has none: start it as a module, "
            f"python -m {package.name}.{file.stem}, or import by the package's name (from {package.name} import ...)"
        )


def become_script(
    file: Path, given: Sequence[str], environ: Mapping[str, str], *, flags: Sequence[str] = ()
) -> NoReturn:
    """This process goes on as the script, told `flags` (--fresh, --resume) and the keys among what was `given`; what is
    no key is the script's own. Raises `UsageError` where it is missing.
    """
    from shoal.files import printable
    from shoal.launcher.own_script import EXPECTS, KEYS, divided, names_no_shoal
    from shoal.launcher.supervision import say

    require_script(file)
    told = {} if names_no_shoal(file) else {EXPECTS: str(os.getpid())}
    if not told:
        say(
            f"shoal: {printable(file)} never names shoal, so nothing of Shoal takes part and keys change nothing: "
            "call shoal.train or shoal.start in it"
        )
    keys, arguments = divided(given)
    sys.stdout.flush()
    sys.stderr.flush()
    told[KEYS] = json.dumps([*flags, *keys])
    os.execve(sys.executable, [sys.executable, str(file), *arguments], {**environ, **told})


def coordination(
    coordinator: str | None, token: Path | None, authorities: Path | None, replicas: int | None
) -> dict[str, str]:
    """The variables that the options stand for; a scheduler may set these itself."""
    if coordinator is None and (token is not None or authorities is not None or replicas is not None):
        raise typer.BadParameter("goes with --coordinator HOST:PORT", param_hint="--token, --authorities, --replicas")
    given = {
        "SHOAL_COORDINATOR": coordinator,
        "SHOAL_COORDINATOR_TOKEN": token,
        "SHOAL_COORDINATOR_CA": authorities and authorities.absolute(),
        "SHOAL_REPLICAS_HERE": replicas,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def lab_at(path: Path | None) -> Lab | None:
    """The lab of a lab file; None where none is named."""
    from shoal.launcher.lab.lab_file import load_lab

    return None if path is None else load_lab(path)
