"""A Ray cluster of several hosts on this one, as Ray's own tests make it.

python -m tests.services.ray install            pip, into this Python's environment
python -m tests.services.ray run                until Ctrl-C; prints the address
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

VERSION = "ray>=2.40"


def why_not() -> str | None:
    """Why no cluster can be started here; None where one can."""
    if importlib.util.find_spec("ray") is None:
        return "the package ray is not installed: python -m tests.services.ray install"
    return None


def install() -> None:
    """From PyPI."""
    subprocess.run([sys.executable, "-m", "pip", "install", VERSION], check=True)


@contextlib.contextmanager
def ray_cluster(*, hosts: int = 2, cores: int = 2) -> Iterator[str]:
    """Hosts of `cores` cores each; its address."""
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"num_cpus": cores, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        for _ in range(hosts - 1):
            cluster.add_node(num_cpus=cores, object_store_memory=100 << 20)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "install":
        install()
    else:
        with ray_cluster() as running, contextlib.suppress(KeyboardInterrupt):
            print(running, flush=True)
            while True:
                time.sleep(3600)
