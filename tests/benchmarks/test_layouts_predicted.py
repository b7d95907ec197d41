"""`benchmarks.layouts` predicts before it measures: what it cannot predict, it refuses before ranks start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import layouts
from benchmarks.layouts_predicted import check_predictable
from shoal.errors import ConfigError, UsageError
from shoal.planner.predict.measured import OPERATIONS
from shoal.planning.calibration import calibration_path
from shoal.topology.calibration import Calibration, CollectiveFit, OperatorTime

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
GPT = RECIPES / "stdlib-gpt.toml"


def _hollow() -> Calibration:
    """Collectives, and one operator of one size: holes that only a prediction finds."""
    fits = (CollectiveFit(backend="shm", operation=name, ranks=2, alpha_s=1e-5, beta_s=1e-9) for name in OPERATIONS)
    one = OperatorTime(operator="linear", dtype="float32", m=1, n=1, k=1, ranks=1, forward_s=1e-6, backward_s=1e-6)
    return Calibration(machine="one", torch="2", memory_bytes_s=1e10, collectives=tuple(fits), operators=(one,))


@pytest.mark.parametrize(
    ("run_file", "overrides", "words"),
    [
        (GPT, [], "not calibrated"),
        ("nope.toml", [], "nope.toml"),
        (GPT, ["bogus.key=1"], "bogus"),
        (RECIPES / "digits.toml", [], "dense GPTs"),
        (RECIPES / "stdlib-moe.toml", [], "dense GPTs"),
    ],
)
def test_what_cannot_be_predicted_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_file: Path | str, overrides: list[str], words: str
) -> None:
    """The run file, its layouts, what the sweep covers and the calibration come first: exit 2, one sentence."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(layouts, "on_ranks", started)
    with pytest.raises(UsageError, match=words) as refused:
        layouts.layouts(Path(run_file), list(overrides))
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert not calibration_path({"SHOAL_CACHE": str(tmp_path)}).exists()


def test_a_layout_of_the_benchmark_that_cannot_be_is_named() -> None:
    """The message says that its keys come from the benchmark; with fewer processes it is left out."""
    keys = ["model.heads=2", "model.kv_heads=2"]
    with pytest.raises(ConfigError, match=r'the layout "tensor=4" of this benchmark: .*layout.tensor = 4'):
        check_predictable(GPT, _hollow(), processes=4, overrides=keys)
    with pytest.raises(ConfigError, match="operators"):
        check_predictable(GPT, _hollow(), processes=2, overrides=keys)


def test_holes_of_the_calibration_are_found_beforehand() -> None:
    """The message for a machine that was measured in part names what is missing."""
    with pytest.raises(ConfigError, match="float32 operators; measure them with 'shoal bench products'"):
        check_predictable(GPT, _hollow(), processes=2)
