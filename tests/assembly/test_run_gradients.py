"""How the gradients of a run depend on where its ranks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.assembly.run import open_run
from shoal.gradients.build import build_gradients
from shoal.gradients.config import GradientsConfig
from shoal.gradients.gradients import Gradients
from shoal.launcher.environment import Place
from tests.verification.layouts import corpus, run_file_of

MIB = 1 << 20


def bucket_size(place, folder: str, ranks_of_a_host: int, asked: dict[str, int]) -> int:
    """Of the gradients of a rank of two, in bytes."""
    run_file = run_file_of(Path(folder), run={"processes": 2}, layout={"replicate": 2}, gradients=asked)
    host, local = divmod(place.rank, ranks_of_a_host)
    here = Place(place.rank, place.size, local, ranks_of_a_host, host, "shoal")
    found: list[GradientsConfig] = []
    with pytest.MonkeyPatch.context() as patch:

        def build(config: GradientsConfig, *rest: Any, **named: Any) -> Gradients:
            found.append(config)
            return build_gradients(config, *rest, **named)

        patch.setattr("shoal.assembly.run_gradients.build_gradients", build)
        open_run(run_file, here, store=place.store)
    return found[0].bucket_size


@pytest.mark.parametrize(
    ("ranks_of_a_host", "asked", "bytes_"),
    [(2, {}, 25 * MIB), (1, {}, 8 * MIB), (2, {"bucket_bytes": 5}, 5), (1, {"bucket_bytes": 5}, 5)],
)
def test_buckets_between_hosts_are_smaller(ranks, tmp_path, ranks_of_a_host: int, asked, bytes_: int) -> None:
    """Unless a size is asked for."""
    corpus(tmp_path)
    assert ranks(2, bucket_size, str(tmp_path), ranks_of_a_host, asked) == [bytes_] * 2
