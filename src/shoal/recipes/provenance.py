"""What a run was made of, so that it can be made again: code, packages, Python, environment.

The files are those of Shoal and of the modules that were imported from the directory in which the run was started. Of
the environment only variables that change how numbers are computed or sent are kept, and never a secret.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from blake3 import blake3

PACKAGE = Path(__file__).parents[1]
PREFIXES = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_")
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
SITE = "site-packages"
GIT_TIMEOUT_S = 10.0


def provenance(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Code, packages and environment of this process, as JSON-able values; about 100 ms."""
    directory = Path.cwd()
    return {
        "directory": str(directory),
        "python": platform.python_version(),
        "packages": packages(),
        "git": git_state(directory),
        "files": file_hashes(imported_files(directory), directory),
        "environment": {
            name: value
            for name, value in sorted(environ.items())
            if name.startswith(PREFIXES) and not any(word in name for word in SECRETS)
        },
    }


def packages() -> dict[str, str]:
    """The version of every installed package."""
    found = ((one.metadata["Name"], one.version) for one in distributions())
    return {name: version for name, version in sorted(found, key=str) if name}


def git_state(directory: Path) -> dict[str, Any] | None:
    """The commit that is checked out, and whether files differ from it; None outside a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))}


def file_hashes(names: Iterable[str], directory: Path) -> dict[str, str | None]:
    """The BLAKE3 hash of each file, None where it is gone; a name that begins with "shoal/" is a file of Shoal's."""
    return {name: _hash(_path(name, directory)) for name in names}


def imported_files(directory: Path) -> list[str]:
    """Shoal's own files, and those that were imported from `directory` or below it."""
    own = [f"shoal/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")]
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    elsewhere = (sysconfig.get_path("stdlib"), f"{PACKAGE}{os.sep}")
    # to resolve a path costs a system call for each of its folders, and thousands of modules are imported
    found = {Path(file).resolve() for file in files if file and not file.startswith(elsewhere) and SITE not in file}
    theirs = [
        str(path.relative_to(directory))
        for path in found
        if path.is_relative_to(directory) and SITE not in path.parts and not path.is_relative_to(PACKAGE)
    ]
    return sorted(own + theirs)


def _path(name: str, directory: Path) -> Path:
    return PACKAGE.parent / name if name.startswith("shoal/") else directory / name


def _hash(path: Path) -> str | None:
    try:
        return blake3(path.read_bytes()).hexdigest()[:32]
    except OSError:
        return None


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
