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

from tests.ports import free_port

VERSION = "ray[default]>=2.40"


def why_not() -> str | None:
    """Why no cluster can be started here; None where one can."""
    if importlib.util.find_spec("ray") is None:
        return "the package ray is not installed: python -m tests.services.ray install"
    return None


def why_no_dashboard() -> str | None:
    """Why no cluster with a dashboard and its job API can be started here; None where one can."""
    if why_not() is None and any(importlib.util.find_spec(name) is None for name in ("aiohttp_cors", "opencensus")):
        return "ray is installed without its dashboard: python -m tests.services.ray install"
    return why_not()


def install() -> None:
    """From PyPI."""
    subprocess.run([sys.executable, "-m", "pip", "install", VERSION], check=True)


@contextlib.contextmanager
def ray_cluster(*, hosts: int = 2, cores: int = 2) -> Iterator[str]:
    """Hosts of `cores` cores each; its address."""
    with _cluster(hosts, cores, include_dashboard=False) as cluster:
        yield cluster.address


@contextlib.contextmanager
def ray_with_dashboard(*, hosts: int = 2, cores: int = 2) -> Iterator[str]:
    """Hosts of `cores` cores each; the address of its dashboard."""
    port = free_port()
    with _cluster(hosts, cores, include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=port):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _cluster(hosts: int, cores: int, **head: Any) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"num_cpus": cores, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=small | head)
    try:
        for host in range(1, hosts):  # each agent empties the folder before it unpacks a working directory there
            cluster.add_node(**small, runtime_env_dir_name=f"runtime_resources-{host}")
        cluster.wait_for_nodes()
        yield cluster
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
