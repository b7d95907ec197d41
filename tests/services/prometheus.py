"""Debian's Prometheus on a free port of loopback, scraping one address every second.

python -m tests.services.prometheus install                    apt-get, as root
python -m tests.services.prometheus run FOLDER HOST:PORT       until Ctrl-C; prints its own address

with prometheus(folder, "127.0.0.1:9100") as server:
    server.ask("up")
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.waiting import HANG_S, wait_until

PACKAGES = ("prometheus",)
_CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
- job_name: shoal
  static_configs:
  - targets: ['{target}']
"""


def why_not() -> str | None:
    """Why none can be started here; None where it can."""
    if shutil.which("prometheus") is None:
        return "Prometheus is not installed: python -m tests.services.prometheus install"
    return None


def install() -> None:
    """Debian's package; its own service stays stopped."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES], check=True, env=environ)


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    address: str

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The samples that answer a query. Raises `AssertionError` where it cannot be answered."""
        address = f"{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(address, timeout=HANG_S) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        assert found["status"] == "success", (query, found)
        return found["data"]["result"]

    def scrapes(self) -> int:
        """How many times it has scraped its target with success."""
        with contextlib.suppress(OSError, AssertionError):
            return int(sum(float(one["value"][1]) for one in self.ask("sum_over_time(up[5m])")))
        return 0

    def wait_for_scrapes(self, count: int) -> None:
        """Until it has scraped so many times, of which `rate` needs two."""
        wait_until(lambda: self.scrapes() >= count, lambda: f"{self.scrapes()} scrapes")


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Runs until the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(_CONFIG.format(target=target))
    here = f"127.0.0.1:{free_port()}"
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "tsdb",
        "web.listen-address": here,
        "log.level": "error",
    }
    with (folder / "prometheus.log").open("wb") as log:
        command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://{here}")
    finally:
        server.terminate()
        server.wait(HANG_S)


if __name__ == "__main__":
    if sys.argv[1] == "install":
        install()
    else:
        with prometheus(Path(sys.argv[2]).resolve(), sys.argv[3]) as running, contextlib.suppress(KeyboardInterrupt):
            print(running.address, flush=True)
            while True:
                time.sleep(3600)
