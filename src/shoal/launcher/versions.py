"""The versions that Shoal is tested with, read from package metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata
import re

from shoal.errors import EnvironmentFault

# `torch>=2.11,<2.14`, as in pyproject.toml.
TORCH_FROM, TORCH_BELOW = (2, 11), (2, 14)
PYTHON_FROM = (3, 11)
EXTRAS = {
    "vision": "scikit-learn",
    "data": "pyarrow",
    "huggingface": "transformers",
    "lightning": "lightning",
    "kafka": "confluent-kafka",
    "float8": "torchao",
    "mpi": "mpi4py",
    "page": "starlette",
    "prometheus": "prometheus-client",
    "tensorboard": "tensorboardX",
    "mlflow": "mlflow-skinny",
    "wandb": "wandb",
    "ray": "ray",
    "sweep": "optuna",
    "profile": "py-spy",
    "federated": "cryptography",
    "flower": "flwr",
    "docs": "sphinx",
    "jax": "jax",
    "tensorflow": "tensorflow",
}
"""The package by which each extra is known to be there."""


def installed(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_torch_version() -> str:
    """The installed version of torch. Raises `EnvironmentFault` outside the tested range."""
    return require_tested_torch(installed("torch"))


def require_tested_torch(version: str | None) -> str:
    """`version` as it is, where it lies in the tested range; else raises `EnvironmentFault`."""
    tested = f"Shoal is tested with torch>={_dotted(TORCH_FROM)},<{_dotted(TORCH_BELOW)}"
    repair = f"pip install 'torch>={_dotted(TORCH_FROM)},<{_dotted(TORCH_BELOW)}'"
    if version is None:
        raise EnvironmentFault(f"torch is not installed: {tested}; {repair}")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not TORCH_FROM <= (int(numbers[1]), int(numbers[2])) < TORCH_BELOW:
        raise EnvironmentFault(f"torch {version} is installed: {tested}; {repair}")
    return version


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
