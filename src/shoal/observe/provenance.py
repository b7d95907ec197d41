"""What a run was made of, so that it can be made again: code, packages, Python, environment.

The files are those of Shoal and of the modules that were imported from the directory in which the run was started. Of
the environment, rank 0's variables that change what is computed or sent are kept with their values (`PREFIXES`, and
those that `SHOAL_RECORD` names), the others by name alone, and a secret's value never.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.launcher.environment import is_secret

PACKAGE = Path(__file__).parents[1]
PREFIXES = (
    *("OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "MALLOC_", "LD_", "PYTHON"),
    *("NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "HIP_", "ROCR_", "HSA_"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    "SHOAL_CACHE",
)
RECORDED_NAMES = "SHOAL_RECORD"
"""The variable that names more to record, with commas: what `shoal submit --env` gave."""
SITES = ("site-packages", "dist-packages")
GIT_TIMEOUT_S = 10.0
_FIELD = re.compile(r"^(Name|Version):[ \t]*(.*?)\s*$", re.MULTILINE | re.IGNORECASE)
_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)+=")


def provenance(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Code, packages and environment of this process, as JSON-able values; about 100 ms."""
    directory = Path.cwd()
    return {
        "directory": str(directory),
        "python": platform.python_version(),
        "packages": packages(),
        "git": git_state(directory),
        "files": file_hashes(imported_files(directory), directory),
        **({} if is_shoals_command() else {"arguments": argument_hash(sys.argv[1:])}),
        **_variables(environ),
    }


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    given = {RECORDED_NAMES, *environ.get(RECORDED_NAMES, "").split(",")}
    kept = {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith(PREFIXES) or name in given) and not is_secret(name, value)
    }
    return {"environment": kept, "other_variables": sorted(environ.keys() - kept.keys())}


def is_shoals_command() -> bool:
    """Whether this process runs a verb of Shoal's, and no script."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return file is None or Path(file).resolve().is_relative_to(PACKAGE)


def argument_hash(arguments: Sequence[str]) -> str:
    """The hash of a script's own arguments, whose values may be secret: without keys of the run file, which are
    recorded as such, and without the flags that say which run is meant.
    """
    own = [one for one in arguments if one not in ("--fresh", "--resume") and not _OVERRIDE.match(one)]
    return blake3(json.dumps(own).encode()).hexdigest()[:32]


def packages() -> dict[str, str]:
    """The version of every installed package."""
    return dict(sorted(filter(None, map(_name_and_version, distributions()))))


def _name_and_version(package: Distribution) -> tuple[str, str] | None:
    """From the head of the package's metadata, of which Python's own parser reads everything, a millisecond each."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or package.read_text("") or ""
    head = {field.lower(): value for field, value in _FIELD.findall(text.partition("\n\n")[0])}
    return (head["name"], head["version"]) if {"name", "version"} <= head.keys() else None


def git_state(directory: Path) -> dict[str, Any] | None:
    """The commit that is checked out, and whether files differ from it; None outside a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))}


def file_hashes(names: Iterable[str], directory: Path) -> dict[str, str | None]:
    """The BLAKE3 hash of each file, None where it is gone; a name that begins with "shoal/" is a file of Shoal's."""
    return {name: hash_of_file(_path(name, directory)) for name in names}


def imported_files(directory: Path) -> list[str]:
    """Shoal's own files, and those that were imported from `directory` or below it."""
    theirs = {path for path in users_modules().values() if path.is_relative_to(directory)}
    return sorted([*shoals_files(), *(str(path.relative_to(directory)) for path in theirs)])


def shoals_files() -> list[str]:
    """Shoal's own files, each as "shoal/..."."""
    return [f"shoal/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")]


def users_modules() -> dict[str, Path]:
    """The modules imported by now that are neither Python's nor Shoal's nor those of an installed package: the file of
    each, by the module's name.
    """
    elsewhere = (sysconfig.get_path("stdlib"), sysconfig.get_path("scripts"), f"{PACKAGE}{os.sep}")
    found: dict[str, Path] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # to resolve a path costs a system call for each of its folders, and thousands of modules are imported
        if not file or file.startswith(elsewhere) or any(site in file for site in SITES):
            continue
        path = Path(file).resolve()
        if not set(SITES) & set(path.parts) and not path.is_relative_to(PACKAGE):
            found[name] = path
    return found


def _path(name: str, directory: Path) -> Path:
    return PACKAGE.parent / name if name.startswith("shoal/") else directory / name


def hash_of_file(path: Path) -> str | None:
    """The first half of the BLAKE3 hash of its bytes, in hexadecimal; None where it cannot be read."""
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
