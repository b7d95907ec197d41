"""`python -m benchmarks.structure`: how many files, lines and imports the package has, room by room, and how far apart
the ends of it are.

Read off the syntax trees; nothing of the package is imported, so that any checkout can be measured (`--source`).
"""

from __future__ import annotations

import ast
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.report import Result, check, print_report

HERE = Path(__file__).parents[1] / "src" / "shoal"
MOST_FILES, MOST_IMPORT_LINES, MOST_LINES, MOST_OPENED = 550, 6000, 450, 3
PARTS = ("Run", "Generation", "Workload", "Process")
"""The classes that hold a run, and that a reader of `shoal train` looks for first."""

T = TypeVar("T")


@dataclass(frozen=True)
class Module:
    """One file: its lines by what they are, the lengths of its functions, and the modules that it imports."""

    room: str
    lines: int
    imports: int
    docstrings: int
    comments: int
    functions: tuple[int, ...]
    needs: frozenset[str]
    classes: frozenset[str]

    @property
    def code(self) -> int:
        """Lines that are neither import, docstring, comment nor blank."""
        return self.lines - self.imports - self.docstrings - self.comments


def structure(
    source: Annotated[Path, typer.Option(help="The package's folder.")] = HERE, as_json: AsJson = False
) -> None:
    """Files, lines and imports of the package, and its longest chains of imports.

    Example: python -m benchmarks.structure --json
    """
    print_report("structure", measure(source), as_json=as_json)


def measure(source: Path) -> Result:
    """A row a room, the largest first, and one for all of them; checks hold what the project aims at."""
    known = modules(source)
    rooms = sorted({one.room for one in known.values()}, key=lambda room: -sum(of(known, room)))
    rows = [row(room, [one for one in known.values() if one.room == room]) for room in rooms]
    whole = row("all", list(known.values()))
    needs = {name: one.needs for name, one in known.items()}
    whole |= {
        "longest_chain_cli_to_comm": longest_chain(needs, "shoal.cli", "shoal.comm"),
        "modules_imported_median": statistics.median(len(found) for found in needs.values()),
        "modules_imported_most": max(len(found) for found in needs.values()),
    }
    opened = {part: files_to(known, "shoal.cli.train", part) for part in PARTS}
    checks = [
        check("files", whole["files"], MOST_FILES, at_most=True),
        check("import lines", whole["import"], MOST_IMPORT_LINES, at_most=True),
        check("longest file", whole["file_most"], MOST_LINES, at_most=True),
        *(check(f"files from shoal train to {part}", n, MOST_OPENED, at_most=True) for part, n in opened.items()),
    ]
    return {"rows": [whole, *rows], "checks": checks}


def of(known: Mapping[str, Module], room: str) -> Iterable[int]:
    """The lines of the files of a room."""
    return (one.lines for one in known.values() if one.room == room)


def modules(source: Path) -> dict[str, Module]:
    """Every module below `source`, by its dotted name."""
    names = {path: dotted(path.relative_to(source.parent)) for path in sorted(source.rglob("*.py"))}
    known = set(names.values())
    return {name: module(path, name, known) for path, name in names.items()}


def dotted(path: Path) -> str:
    """The name under which the file at `path` is imported."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def module(path: Path, name: str, known: set[str]) -> Module:
    """What is counted of one file."""
    text = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    nodes = list(ast.walk(tree))
    for_types = {id(below) for node in nodes if is_for_types(node) for below in ast.walk(node)}
    imports = {line for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for line in span(node)}
    strings = {line for node in nodes if is_docstring(node) for line in span(node)} - imports
    blank = {n for n, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")}
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    room = name.split(".")[1] if name.count(".") else "shoal"
    return Module(
        room=room if path.parent.name != "shoal" or path.name == "__init__.py" else "shoal",
        lines=len(lines),
        imports=len(imports),
        docstrings=len(strings),
        comments=len(blank - strings - imports),
        functions=tuple(len(span(node)) for node in functions),
        needs=frozenset(imported((node for node in nodes if id(node) not in for_types), known) - {name}),
        classes=frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef)),
    )


def span(node: Any) -> range:
    """The lines of a node."""
    return range(node.lineno, node.end_lineno + 1)


def is_docstring(node: ast.AST) -> bool:
    """Whether it is text that stands by itself: of a module, a class, a function or a constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_for_types(node: ast.AST) -> bool:
    """Whether what stands below it is seen by type checkers alone."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(nodes: Iterable[ast.AST], known: set[str]) -> set[str]:
    """The modules of the package that these nodes import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
    return found & known


def row(room: str, found: list[Module]) -> dict[str, Any]:
    """The counts of a room."""
    functions = [length for one in found for length in one.functions] or [0]
    files = [one.lines for one in found]
    return {
        "room": room,
        "files": len(found),
        "lines": sum(files),
        "code": sum(one.code for one in found),
        "docstring": sum(one.docstrings for one in found),
        "import": sum(one.imports for one in found),
        "file_median": statistics.median(files),
        "file_p90": ninth_of_ten(files),
        "file_most": max(files),
        "function_median": statistics.median(functions),
        "function_p90": ninth_of_ten(functions),
    }


def ninth_of_ten(lengths: list[int]) -> int:
    """What nine in ten do not exceed."""
    return sorted(lengths)[max(0, -(-9 * len(lengths) // 10) - 1)]


def longest_chain(needs: Mapping[str, Iterable[str]], first: str, last: str) -> int:
    """The modules on the longest chain of imports from the room `first` to the room `last`; imports make no circle."""

    @cache
    def longest(name: str) -> int:
        """From `name` to the room `last`; 0 where no chain leads there."""
        onward = max((longest(other) for other in needs[name]), default=0)
        return onward + 1 if onward else int(in_room(name, last))

    return max(longest(name) for name in needs if in_room(name, first))


def in_room(name: str, room: str) -> bool:
    """Whether the module is the room's, or in it."""
    return name == room or name.startswith(f"{room}.")


def files_to(known: Mapping[str, Module], start: str, wanted: str) -> int:
    """How many files a reader opens who begins at `start` and follows imports to the class `wanted`; 0: it is none."""
    return first_depth(start, lambda name: known[name].needs, lambda name: wanted in known[name].classes)


def first_depth(start: T, onward: Callable[[T], Iterable[T]], found: Callable[[T], bool]) -> int:
    """The places on the shortest way from `start`, itself included, to one that is `found`; 0 where there is none."""
    waiting, seen = deque([(start, 1)]), {start}
    while waiting:
        place, depth = waiting.popleft()
        if found(place):
            return depth
        for other in onward(place):
            if other not in seen:
                seen.add(other)
                waiting.append((other, depth + 1))
    return 0


if __name__ == "__main__":
    run(structure)
