"""What import-linter cannot say: how much a module may know, how much a function may ask for, and that nothing is
circular.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent
MOST_IMPORTS, MOST_ARGUMENTS = 25, 9
LONG_SIGNATURES = {
    "shoal.api:start": "what a user's loop hands over, all of it by keyword",
    "shoal.comm.shm.transport:collective": "one call of the interpreter between c10d and the core, without objects",
    "shoal.comm.shm.transport:at_once": "the same",
    "shoal.comm.shm.transport:collective_of_lists": "the same",
    "shoal.horovod.optimizer:DistributedOptimizer": "stands in for Horovod's, with its signature",
    "shoal.models.keyed_functions:_attention": "stands in for scaled_dot_product_attention, with its signature",
}
"""Functions that take more, and why."""


@pytest.fixture(autouse=True, scope="module")
def without_collections() -> Iterator[None]:
    """A million nodes are kept, and each collection would go through them all."""
    gc.disable()
    yield
    gc.enable()


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, by its dotted name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(("shoal", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports_of(nodes: list[ast.AST], known: dict[str, ast.Module]) -> set[str]:
    """The modules of the package that these nodes import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shoal":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
    return found


def test_no_module_knows_too_many_others() -> None:
    """A module that imports more than 25 others is becoming the central object."""
    known = modules()
    crowded = {
        name: len(found)
        for name, tree in known.items()
        if len(found := imports_of([*ast.walk(tree)], known)) > MOST_IMPORTS
    }
    assert not crowded


def is_command(module: str, function: str) -> bool:
    """Whether the arguments are a command's options."""
    return module.startswith("shoal.cli") or module == f"shoal.bench.{function}"


def test_no_function_asks_for_too_much() -> None:
    """At most nine arguments; functions of `cli` and commands of `bench` take a command's options and stand apart."""
    asking = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_command(name, node.name):
                arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len([argument for argument in arguments if argument not in ("self", "cls")])
                if count > MOST_ARGUMENTS:
                    asking.append(f"{name}:{node.name}")
    assert sorted(asking) == sorted(LONG_SIGNATURES)


def nodes_that_run(tree: ast.AST) -> list[ast.AST]:
    """All below `tree` but what stands under `if TYPE_CHECKING`."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"):
            found += [child, *nodes_that_run(child)]
    return found


def test_modules_import_each_other_in_no_circle() -> None:
    """Neither when they are imported nor when a function runs; what types alone need is left out."""
    known = modules()
    edges = {name: imports_of(nodes_that_run(tree), known) - {name} for name, tree in known.items()}
    done: set[str] = set()
    for start in edges:
        path: list[str] = []

        def visit(name: str, path: list[str] = path) -> None:
            assert name not in path, f"circle: {' -> '.join([*path[path.index(name) :], name])}"
            if name in done:
                return
            path.append(name)
            for other in sorted(edges.get(name, ())):
                visit(other)
            path.pop()
            done.add(name)

        visit(start)


def test_a_circle_would_be_found() -> None:
    """The check sees an import that is there."""
    known = modules()
    assert "shoal.gradients.bucket" in imports_of(list(known["shoal.gradients.replicated"].body), known)


CUDA_ALONE = {
    "assembly/metering.py": "names and identifiers of NVIDIA's GPUs, for NVML",
    "assembly/process.py": "one GPU a rank: only CUDA's ranks have a group",
    "comm/nccl.py": "NCCL, and which GPU a rank has",
    "engine/precision.py": "float8 asks for a compute capability",
    "horovod/__init__.py": "NCCL",
    "horovod/engine.py": "NCCL",
    "observe/profile/first_step.py": "which attention kernels it has",
    "sparsity/semi_structured.py": "products with two of every four weights",
}
"""Files that speak of CUDA where `torch.accelerator` has no word for it, and why."""


def test_what_any_accelerator_has_is_not_asked_of_cuda() -> None:
    """Streams, events, memory and generators are those of `torch.accelerator`, so that they are XPU's and MPS's too."""
    code = re.compile(r"^[^#\n]*\btorch\.cuda\b", re.MULTILINE)
    asking = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if code.search(path.read_text("utf-8"))}
    assert asking == set(CUDA_ALONE)


@functools.cache
def names_in(module: str) -> set[str]:
    """What a module defines or imports, wherever in it."""
    found = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def lost_imports(tree: ast.Module) -> list[str]:
    """What is imported of the package and is not there, wherever the import stands."""
    lost, known = [], modules()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shoal":
            named = [alias.name for alias in node.names if f"{node.module}.{alias.name}" not in known]
            there = names_in(node.module) if named and node.module in known else set()
            if "__getattr__" not in there:
                lost += [f"{node.module}.{name}" for name in named if name not in there]
    return lost


def test_what_is_imported_is_there() -> None:
    """Every name that a module imports of another is there, also where a verb imports it late: one that has moved is
    missed here, and not by whoever calls that verb first.
    """
    assert {name: lost for name, tree in modules().items() if (lost := lost_imports(tree))} == {}


def test_a_name_that_has_moved_is_seen() -> None:
    """The check has teeth."""
    tree = ast.parse("def verb():\n    from shoal.launcher.warm import MMAP\n    from shoal.launcher import warm")
    assert lost_imports(tree) == ["shoal.launcher.warm.MMAP"]
