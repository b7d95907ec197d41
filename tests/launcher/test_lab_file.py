"""The lab file: what it means, and one sentence for everything that it cannot mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.config.check import Table, keys_of
from shoal.config.load import markdown
from shoal.errors import ConfigError
from shoal.launcher.lab.lab_file import LabTable, LinkTable, lab_from, load_lab
from tests.launcher.labs import lab_of


def test_a_number_of_hosts_is_as_many_names() -> None:
    """Hosts are numbered, ranks go host by host, and rates are the slower of two links unless a pair has a line."""
    lab = lab_of(
        [{"host": 2, "rate_mbit": 50}, {"between": [2, 0], "rate_mbit": 5}], hosts=3, ranks_per_host=[2, 1, 3],
    )  # fmt: skip
    assert [host.name for host in lab.hosts] == ["host-0", "host-1", "host-2"]
    assert [list(host.ranks) for host in lab.hosts] == [[0, 1], [2], [3, 4, 5]]
    assert lab.host_of == (0, 0, 1, 2, 2, 2)
    assert (lab.rate_mbit(0, 1), lab.rate_mbit(1, 2), lab.rate_mbit(0, 2), lab.rate_mbit(2, 0)) == (1000, 50, 5, 5)
    assert lab.bytes_s()[1][2] == 50e6 / 8


def test_hosts_may_have_names(tmp_path: Path) -> None:
    """And links are given by them; read from a file."""
    path = tmp_path / "lab.toml"
    path.write_text('[lab]\nhosts = ["tuna", "cod"]\nrate_mbit = 100\n[[link]]\nhost = "cod"\nrate_mbit = 1\n')
    lab = load_lab(path)
    assert [(host.name, host.rate_mbit) for host in lab.hosts] == [("tuna", 100), ("cod", 1)]


BAD: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
    ({}, [], "lab.hosts: missing"),
    ({"hosts": 2, "rate": 3}, [], r"lab.rate: unknown key, did you mean 'rate_mbit'\?"),
    ({"hosts": 0}, [], "lab.hosts: found 0; a lab has 1 to 64 hosts"),
    ({"hosts": 65}, [], "lab.hosts: found 65"),
    ({"hosts": -1}, [], "lab.hosts: found -1; a lab has 1 to 64 hosts"),
    ({"hosts": 1 << 40}, [], "lab.hosts: found 1099511627776"),
    ({"hosts": 2, "rate_mbit": float("nan")}, [], "nan"),
    ({"hosts": 2, "rate_mbit": 40_000, "buffer_ms": 10_000}, [], r"lab.buffer_ms: .* 50.0 GB that wait"),
    ({"hosts": 2, "buffer_ms": 5_000}, [{"rate_mbit": 9_000, "host": 1}], "9000 Mbit/s are 5.6 GB"),
    ({"hosts": 2}, [{"rate_mbit": 5, "host": 1}, {"rate_mbit": 6, "host": 1}], r"link\[1\]: a second rate"),
    ({"hosts": 2}, [{"rate_mbit": 5, "between": [n, 1 - n]} for n in (0, 1)], r"link\[1\]: a second rate"),
    ({"hosts": ["a", "a"]}, [], "a name of its own"),
    ({"hosts": ["No Name"]}, [], "lower-case letters"),
    ({"hosts": "two"}, [], "lab.hosts: found 'two'"),
    ({"hosts": 2, "rate_mbit": 0}, [], "lab.rate_mbit: found 0"),
    ({"hosts": 2, "burst_kib": 1}, [], "lab.burst_kib: found 1"),
    ({"hosts": 2, "network": "kernal"}, [], "did you mean 'kernel'"),
    ({"hosts": 2, "ranks_per_host": [1, 2, 3]}, [], "found 3 numbers for 2 hosts"),
    ({"hosts": 2, "ranks_per_host": [1, 0]}, [], "every host has a rank"),
    ({"hosts": 2, "ranks_per_host": 500}, [], "at most 256"),
    ({"hosts": 2}, [{"rate_mbit": 5}], r"link\[0\]: it names one host or two"),
    ({"hosts": 2}, [{"rate_mbit": 5, "host": 0, "between": [0, 1]}], r"link\[0\]: it names one host or two"),
    ({"hosts": 2}, [{"rate_mbit": 5, "host": 2}], r"link\[0\].host: found 2; the hosts are 0 to 1"),
    ({"hosts": 2}, [{"rate_mbit": 5, "host": "cod"}], "found 'cod'; the hosts are 0 to 1: host-0, host-1"),
    ({"hosts": 2}, [{"rate_mbit": 5, "between": [0, 0]}], "two different hosts"),
    ({"hosts": 3}, [{"rate_mbit": 5, "between": [0, 1, 2]}], "two different hosts"),
    ({"hosts": 2}, [{"host": 0, "speed": 5}], "link"),
]


@pytest.mark.parametrize(("table", "links", "sentence"), BAD, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused(table: dict[str, Any], links: list[dict[str, Any]], sentence: str) -> None:
    """In one sentence that names the file and the key."""
    with pytest.raises(ConfigError, match=sentence) as caught:
        lab_from({"lab": {"rate_mbit": 10, **table}, "link": links}, file="slow.toml")
    assert str(caught.value).startswith("slow.toml: ")
    assert "\n" not in str(caught.value)


class Pages(Table, frozen=True):
    """The two tables as a reference has them."""

    lab: LabTable
    link: LinkTable


def test_every_key_is_in_the_reference() -> None:
    """With type, default and sentence, as the tables generate them."""
    written = (Path(shoal.__file__).parents[2] / "docs/reference/lab-file.md").read_text(encoding="utf-8")
    generated = [line for line in markdown(Pages, title="").splitlines() if line.startswith("| `")]
    assert len(generated) == len(keys_of(LabTable)) + len(keys_of(LinkTable))
    assert [line for line in generated if line not in written] == []
