"""The doctor's judgements, on invented facts; and one visit to this machine."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from shoal.launcher import doctor, sockets
from shoal.launcher.devices import MemoryLimit

GIB = doctor.GIB
WELL = [
    doctor.python_finding((3, 11)),
    doctor.torch_finding("2.13.0"),
    doctor.extra_finding("vision", "scikit-learn", None),
    doctor.gpu_finding(8, "0,1"),
    doctor.gpu_finding(0, ""),
    doctor.attention_finding("cuda", {"bfloat16": "cudnn", "float32": "efficient", "float64": "math"}),
    doctor.attention_finding("cpu", {"float32": "flash"}),
    doctor.cores_finding(8, "8"),
    doctor.memory_finding(MemoryLimit(64 * GIB, 32 * GIB, "the machine")),
    doctor.memory_finding(None),
    doctor.shared_memory_finding(GIB),
    doctor.core_finding(built=True),
    doctor.lab_finding([], why_not="a lab needs iproute2"),
    doctor.open_files_finding(resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    doctor.host_name_finding("tuna", "10.0.0.1", 0.01),
    doctor.interface_finding("eth0", ["lo", "eth0"]),
    doctor.interface_finding(None, ["lo"]),
]
ILL = [
    (doctor.python_finding((3, 10)), "problem", "install Python 3.11"),
    (doctor.torch_finding("2.10.0"), "problem", "pip install"),
    (doctor.torch_finding(None), "problem", "pip install"),
    (doctor.gpu_finding(8, "-1"), "warning", "unset CUDA_VISIBLE_DEVICES"),
    (doctor.attention_finding("cuda", {"bfloat16": "math"}), "warning", "built for this GPU"),
    (doctor.attention_finding("", {}), "warning", "import torch"),
    (doctor.cores_finding(2, "16"), "warning", "unset OMP_NUM_THREADS"),
    (doctor.memory_finding(MemoryLimit(64 * GIB, GIB, "its control group")), "warning", "raise the limit"),
    (doctor.shared_memory_finding(64 << 20), "warning", "--shm-size"),
    (doctor.shared_memory_finding(None), "warning", "mount"),
    (doctor.core_finding(built=False), "warning", "install a C compiler"),
    (doctor.open_files_finding(256, 4096), "warning", "ulimit -n 4096"),
    (doctor.host_name_finding("tuna", None, 5.0), "warning", "127.0.1.1 tuna"),
    (doctor.host_name_finding("tuna", "10.0.0.1", 5.0), "warning", "/etc/hosts"),
    (doctor.interface_finding("eth7", ["lo", "eth0"]), "problem", "eth0"),
    (doctor.interface_finding(None, ["eth0"]), "problem", "ip link set lo up"),
]


@pytest.mark.parametrize("finding", WELL, ids=lambda finding: f"{finding.name}: {finding.found}")
def test_what_is_well_has_nothing_to_repair(finding):
    """Status ok and a repair exclude each other."""
    assert (finding.status, finding.repair) == ("ok", None)


@pytest.mark.parametrize(("finding", "status", "repair"), ILL, ids=lambda value: getattr(value, "found", None))
def test_what_is_ill_has_its_repair(finding, status, repair):
    """Every warning and problem says what to do."""
    assert finding.status == status
    assert repair in finding.repair


def test_a_machine_without_ports_is_ill(monkeypatch):
    """No loopback port: a problem, with the repair of the error that a run would get."""
    monkeypatch.setattr(sockets, "LOOPBACK", "192.0.2.1")
    finding = doctor.port_finding()
    assert finding.status == "problem"
    assert finding.repair is not None
    assert finding.repair.startswith("free some ports")


def test_a_cache_folder_that_cannot_be_made_is_ill(tmp_path: Path):
    """A file where the folder should be: nothing can be kept there."""
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o600)
    found = doctor.cache_finding(tmp_path / "file" / "shoal")
    assert (found.status, found.repair) == ("warning", "set SHOAL_CACHE to a folder that can")
    assert doctor.cache_finding(tmp_path / "not" / "there" / "yet").status == "ok"


def test_a_visit_finds_everything_once():
    """On a real machine every check answers, under a name of its own."""
    found = doctor.findings(os.environ)
    assert len({finding.name for finding in found}) == len(found)
    assert {"python", "torch", "memory", "loopback port", "interface", "cache folder"} <= {f.name for f in found}
    assert all((finding.repair is None) == (finding.status == "ok") for finding in found)
