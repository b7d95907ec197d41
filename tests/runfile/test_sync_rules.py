"""`wire.algorithm` is for groups over Gloo: refused beside another transport, and said where there is no such group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.errors import ConfigError
from shoal.runfile.rules import check_across
from shoal.topology.layout import Layout
from tests.verification.layouts import run_file_of


@pytest.mark.parametrize("transport", ["shm", "hierarchical", "mpi"])
def test_an_algorithm_beside_another_transport_is_refused(transport: str) -> None:
    run_file = run_file_of(Path("."), wire={"algorithm": "ring", "transport": transport})
    with pytest.raises(ConfigError, match=f'wire.algorithm = "ring" with wire.transport = "{transport}": .* "gloo"'):
        check_across(run_file, file="run.toml")


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_an_algorithm_where_groups_may_be_gloo_s_is_taken(transport: str) -> None:
    check_across(run_file_of(Path("."), wire={"algorithm": "torus", "transport": transport}), file="run.toml")


def wires(place: Any) -> list[str]:
    """Of the world under each algorithm."""
    return [
        build_mesh(
            Layout(replicate=place.size),
            place.rank,
            store=place.store,
            device=torch.device("cpu"),
            generation=number,
            wire=WireConfig(timeout_s=180, algorithm=algorithm),
        ).world.wire
        for number, algorithm in enumerate(("backend", "ring"))
    ]


def test_a_group_in_memory_says_that_it_has_no_algorithm(ranks) -> None:
    plain = "shared memory: 2 ranks on one host"
    assert ranks(2, wires) == [[plain, f'{plain}; wire.algorithm = "ring" is for groups over Gloo']] * 2
