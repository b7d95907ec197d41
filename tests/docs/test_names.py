"""What pages name in their text is there: keys, verbs and options, targets, extras, modules, variables."""

from __future__ import annotations

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
