"""How Shoal came onto this machine, and so the command that adds an optional part of it; which file hides a package.

pip writes down what a package was installed from (`direct_url.json`): a folder, a repository or an archive; of a
package from an index it writes nothing. Source: PEP 610, "Recording the Direct URL Origin of installed distributions".
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "shoal"
PACKAGE = Path(__file__).parent
NEEDED = ("torch", "numpy", "safetensors", "msgspec", "tomli_w", "typer", "rich", "blake3")
"""Packages without which nothing works, by the names that are imported. Each is a folder of modules."""


def install_command(extra: str) -> str:
    """The command that brings the optional part `extra`, from where this Shoal came."""
    return f"pip install {requirement(extra, source_tree=source_tree(PACKAGE), origin=_origin())}"


def requirement(extra: str, *, source_tree: Path | None, origin: dict[str, Any] | None) -> str:
    """What to give pip, quoted for a shell. `source_tree`: the folder that Shoal runs from; `origin`: the contents of
    `direct_url.json`. None: there is none.
    """
    name = f"{NAME}[{extra}]"
    if source_tree is not None:
        return f"-e {_quoted(f'{source_tree}[{extra}]')}"
    if origin is None:
        return _quoted(name)
    url, repository = str(origin.get("url", "")), origin.get("vcs_info")
    if repository is not None:
        return _quoted(f"{name} @ {repository['vcs']}+{url}@{repository['commit_id']}")
    if "dir_info" in origin:
        return _quoted(f"{unquote(urlsplit(url).path)}[{extra}]")
    return _quoted(f"{name} @ {url}")


def source_tree(package: Path) -> Path | None:
    """The folder of the project where `package` lies in its source, None where it was copied by an installation."""
    tree = package.parent.parent
    return tree if package.parent.name == "src" and (tree / "pyproject.toml").is_file() else None


def _quoted(text: str) -> str:
    return f"'{text}'" if "'" not in text else shlex.quote(text)


def _origin() -> dict[str, Any] | None:
    from importlib.metadata import PackageNotFoundError, distribution  # 20 ms, for messages alone

    try:
        text = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    return None if text is None else json.loads(text)


def hidden_package(folders: Sequence[str]) -> str | None:
    """What to say of a user's file that Python would import in the place of a package that Shoal needs, because it has
    its name. `folders` are searched in their order, like `sys.path`; nothing is imported. None: there is no such file.
    """
    for name in NEEDED:
        found = PathFinder.find_spec(name, folders)
        if found is not None and found.submodule_search_locations is None:
            return (
                f"{found.origin} has the name of the package {name}, and Python would import it in its place: rename "
                "the file, or take its folder out of PYTHONPATH"
            )
    return None
