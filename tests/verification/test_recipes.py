"""Every recipe is the model of one process: its run file under two ranks, its own data, small batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.assembly.objects import UserObjects
from shoal.launcher.environment import Place
from shoal.runfile.load import load_run
from shoal.verification.verify import verify_rank
from tests.ranks import TestPlace

ROOT = Path(__file__).parents[2]
RECIPES = {
    "vit": "layout.shard=2",
    "resnet": "layout.replicate=2",
    "encoder": "layout.replicate=2",
    "dlrm": "layout.shard=2",
    "conformer": "layout.shard=2",
    "diffusion": "layout.replicate=2",
    "fno": "layout.shard=2",
    "two-tower": "layout.replicate=2",
}


def proved(place: TestPlace, name: str, layout: str, folder: str) -> dict[str, Any] | None:
    """The verdict on a step of the recipe, in float64."""
    overrides = [layout, "run.processes=2", f'run.directory="{folder}"', "batch.global_samples=6", 'run.device="cpu"']
    run_file = load_run(ROOT / f"recipes/{name}.toml", overrides)
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    verdict = verify_rank(run_file, here, UserObjects(), steps=1, exact=True, store=place.store)
    return None if verdict is None else verdict.to_json() | {"sentence": verdict.sentence()}


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize(("name", "layout"), RECIPES.items())
def test_a_recipe_is_the_model_of_one_process(ranks, tmp_path: Path, name: str, layout: str) -> None:
    """Loss, every gradient and the weights after a step."""
    verdict, *_ = ranks(2, proved, name, layout, str(tmp_path))
    assert verdict["holds"], verdict["sentence"]
