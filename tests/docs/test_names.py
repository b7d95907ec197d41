"""What pages name in their text is there: keys, verbs and options, targets, extras, modules, variables."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from click import Context

from shoal.config.check import Table, keys_of, variants_of
from shoal.own_loop.loop import Training
from shoal.runfile.run_file import RunFile
from tests.docs.test_pages import PAGES_AND_README, named_verb

ROOT = Path(__file__).parents[2]
SUFFIXES = {"html", "json", "jsonl", "md", "png", "py", "safetensors", "toml"}
"""Of files that are named like keys: run.toml."""
OF_PLAIN_OBJECTS = {"data.feed", "elastic.run", "model.generate", "model.model", "optimizer.state"}
"""Of a module of Shoal's, of Horovod, and of a script's own model and optimizer."""
SPARSITY = "sparsity"
SOURCES = sorted([*ROOT.glob("src/shoal/**/*.py"), *ROOT.glob("benchmarks/**/*.py")])
ROOMS = sorted(path.stem for path in (ROOT / "src/shoal").iterdir() if path.is_dir() or path.suffix == ".py")
PLACE = re.compile(rf"(?<![\w./-])(?:src/shoal/)?((?:{'|'.join(ROOMS)})/[\w/]+\.(?:py|c|h|js))\b")
TEST_OR_BENCHMARK = re.compile(r"(?<![\w./-])((?:tests|benchmarks|recipes)/[\w/]+\.(?:py|toml|cpp|sh))\b")
DOTTED = re.compile(r"\bshoal((?:\.[a-z]\w*)+)")
OF_NO_MODULE = {"shoal.json"}
"""A file name that ends like a module's."""


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def quoted(page: Path) -> list[str]:
    """What stands in backquotes, in one line each, as it is where it is no cell of a table."""
    return [" ".join(code.split()).replace("\\|", "|") for code in re.findall(r"`([^`]+)`", prose(page))]


@cache
def below(declared: object) -> tuple[type[Table], ...]:
    """The tables that a key of this type may hold, in lists and by name too."""
    found = [*variants_of(declared).values()]
    for inner in getattr(declared, "__args__", ()):
        found += below(inner)
    return tuple(found)


def is_key(path: list[str]) -> bool:
    """Whether there is such a key in one of the variants; below one that takes any table, everything is."""
    tables: tuple[type[Table], ...] = (RunFile,)
    for name in path:
        held = [keys_of(table)[name].type for table in tables if name in keys_of(table)]
        if not held:
            return not tables or name == "kind"
        tables = tuple(table for one in held for table in below(one))
    return True


def keys_named(page: Path) -> Iterator[str]:
    """What looks like `table.key`, of a table of the run file."""
    for code in quoted(page):
        found = re.match(r"[a-z_]+(?:\.[a-z0-9_]+)+(?=$|\s*=|\s)", code)
        if found is None or found[0] in OF_PLAIN_OBJECTS:
            continue
        first, *_, last = found[0].split(".")
        if first in keys_of(RunFile) and last not in SUFFIXES:
            yield found[0]


@pytest.mark.parametrize("page", PAGES_AND_README, ids=lambda path: str(path.relative_to(ROOT)))
def test_keys_in_the_text_are_those_of_the_run_file(page: Path) -> None:
    """`run.steps_done` and the like are those of an own loop's `run`, in place of the table."""
    of_runs = {f"run.{name}" for name in dir(Training)} | {"run.update.loss"}
    inside = [SPARSITY] if page.stem == SPARSITY else []
    lost = [
        key
        for key in keys_named(page)
        if key not in of_runs and not is_key(key.split(".")) and not is_key([*inside, *key.split(".")])
    ]
    assert lost == []


@pytest.mark.parametrize("page", PAGES_AND_README, ids=lambda path: str(path.relative_to(ROOT)))
def test_verbs_and_options_in_the_text_are_there(page: Path) -> None:
    """`shoal bench step|comm` are two; of `shoal submit --to` the verb `job` has the option."""
    for code in quoted(page):
        if not re.match(r"shoal [a-z]", code):
            continue
        words = [word.split("|") for word in code.replace("'", "").split()[1:]]
        first = next((place for place, choices in enumerate(words[:2]) if len(choices) > 1), None)
        choices = [""] if first is None else words[first]
        for choice in choices:
            one = [word[0] for word in words] if first is None else [*(w[0] for w in words[:first]), choice]
            command, rest = named_verb(one)
            own = {option for parameter in command.get_params(Context(command)) for option in parameter.opts}
            given = rest[: rest.index("--")] if "--" in rest else rest
            lost = [word for word in given if word.startswith("-") and word.partition("=")[0].rstrip(",.") not in own]
            assert lost == [], code


def test_what_brings_parts_of_shoal_is_there() -> None:
    """Targets of make, extras, modules of benchmarks, and variables of the environment."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    lost: list[str] = []
    for page in PAGES_AND_README:
        text = page.read_text(encoding="utf-8")
        lost += [
            one for one in re.findall(r"(?:`|^ {4}|^)make ([a-z-]+)", text, flags=re.MULTILINE) if one not in targets
        ]
        extras = [*re.findall(r"\.\[([a-z,]+)\]", text), *re.findall(r"extra `([a-z]+)`", text)]
        lost += [one for each in extras for one in each.split(",") if one not in project["optional-dependencies"]]
        for module in re.findall(r"python -m (benchmarks[\w.]+)", text):
            place = ROOT / module.replace(".", "/")
            lost += [] if place.with_suffix(".py").exists() or (place / "__main__.py").exists() else [module]
        lost += [one for one in set(re.findall(r"\bSHOAL_[A-Z_]+", text)) if f'"{one}"' not in sources]
    assert lost == []


def is_module(dotted: str) -> bool:
    """Whether this is a room, a module, or a name that a module or the package defines."""
    place = ROOT / "src/shoal"
    for name in dotted.split(".")[1:]:
        if (place / name).is_dir():
            place /= name
        elif (place / f"{name}.py").exists():
            return True
        else:
            defined = (place / "__init__.py").read_text(encoding="utf-8")
            return re.search(rf"\b{name}\b", defined) is not None
    return True


def lost_places(text: str) -> list[str]:
    """What the text names of files and modules and is not there: `parallel/split.py`, `shoal.parallel.split`."""
    lost = [one for one in PLACE.findall(text) if not (ROOT / "src/shoal" / one).exists()]
    lost += [one for one in TEST_OR_BENCHMARK.findall(text) if not (ROOT / one).exists()]
    dotted = {f"shoal{one}" for one in DOTTED.findall(text)} - OF_NO_MODULE
    return lost + sorted(one for one in dotted if not is_module(one))


def told(path: Path) -> str:
    """What a page or the docstrings and comments of a source say. (Parsing a thousand files would take seconds.)"""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    return "\n".join(
        [*re.findall(r'"""(.*?)"""', text, flags=re.DOTALL), *re.findall(r"^ *#.*", text, flags=re.MULTILINE)]
    )


def test_files_and_modules_in_pages_and_docstrings_are_there() -> None:
    """A file that moves is named by its new place everywhere."""
    pages = [*PAGES_AND_README, ROOT / "CONTRIBUTING.md"]
    lost = {str(path.relative_to(ROOT)): found for path in [*pages, *SOURCES] if (found := lost_places(told(path)))}
    assert lost == {}


def test_a_file_that_is_gone_is_seen() -> None:
    """The check has teeth, for each form of a name."""
    gone = ["parallel/gone.py", "src/shoal/sync/gone.py", "tests/docs/gone.py", "shoal.sync.gone", "shoal.gone"]
    assert [len(lost_places(f"see `{name}`.")) for name in gone] == [1] * len(gone)
    assert (
        lost_places("`parallel/split.py`, `tests/docs/test_names.py`, `shoal.sync.strategy.Sync`, `shoal.start`") == []
    )


def test_rooms_list_files_that_they_have() -> None:
    """The head of a room is a table: a file or several, then what they are."""
    lost: list[str] = []
    for path in SOURCES:
        if path.name == "__init__.py":
            head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            rows = re.findall(r"^(?: {4})?((?:\w+(?:\.py)?, )*\w+(?:\.py)?) {2,}\S", head, flags=re.MULTILINE)
            named = [path.parent / name.removesuffix(".py") for row in rows for name in row.split(", ")]
            lost += [str(one) for one in named if not one.exists() and not one.with_suffix(".py").exists()]
    assert lost == []


def test_the_architecture_has_every_room() -> None:
    """Each folder and file of the package has its line in the tree, and is on a floor."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tree = page.partition("```\nsrc/shoal/\n")[2].partition("```")[0]
    lines = " ".join(line.strip().partition("   ")[0] for line in tree.splitlines())
    floors = " ".join(re.findall(r"^\| \d+ \|.*", page, flags=re.MULTILINE))
    rooms = [room for room in ROOMS if not room.startswith("__")]
    assert [room for room in rooms if not re.search(rf"\b{room}\b", lines)] == []
    assert [room for room in rooms if f"`{room}`" not in floors] == []
