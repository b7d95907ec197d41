"""`make gpu` where there is no GPU: it says what it needs, and its table can be tried."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.gpu import (
    CODECS,
    COMPILED,
    DRY,
    FIRST,
    MASKED,
    OVER,
    PLAIN,
    SHOAL,
    SIDES,
    Setting,
    gpu,
    openings,
    require_gpu,
)
from benchmarks.gpu_figures import Book, compared
from benchmarks.gpu_layouts import LAYOUTS, RUN, page
from shoal.errors import EnvironmentFault
from shoal.runfile.load import load_run
from tests.benchmarks.test_commands import app_of
from tests.waiting import HANG_S

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.sh"


@pytest.mark.slow
def test_a_dry_run_measures_every_side_or_says_why_not(tmp_path: Path) -> None:
    """It writes under its own name, beside the figures of a card."""
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({"NVIDIA H100": {"rows": []}}))
    done = CliRunner().invoke(
        app_of(gpu), ["--dry-run", "--turns", "2", "--block", "1", "--out", str(out)], catch_exceptions=False
    )
    assert "cards differ" in done.output
    found = json.loads(out.read_text())
    assert found.keys() == {"NVIDIA H100", "dry run"}
    rows = {row["side"]: row for row in found["dry run"]["rows"]}
    assert rows.keys() == {PLAIN, COMPILED[PLAIN], *SIDES, *MASKED}
    refused = {"float8": "compute capability", "2:4": "on a cpu device, which has no such products"}
    assert all(sentence in rows[side]["refused"] for side, sentence in refused.items())
    assert all(row["ms"] > 0 for side, row in rows.items() if side not in refused)


def test_a_dry_run_times_every_kernel() -> None:
    done = CliRunner().invoke(app_of(gpu), ["--dry-run", "--kernels", "--turns", "2"], catch_exceptions=False)
    rows = {row["kernel"]: row for row in json.loads(done.stdout)["dry run"]["kernels"]}
    assert rows.keys() == {"copy", *CODECS, "top k, selection", "AdamW", "AdamW, 8 bit"}
    assert all(value > 0 for row in rows.values() for key, value in row.items() if key.endswith("ms"))
    assert {"encode_ms", "decode_ms", "encode_in_torch_ms", "decode_in_torch_ms"} < rows["int8"].keys()


def test_what_time_does_not_suffice_for_is_said() -> None:
    done = CliRunner().invoke(
        app_of(gpu), ["--dry-run", "--turns", "2", "--block", "1", "--limit-s", "0"], catch_exceptions=False
    )
    rows = {row["side"]: row for row in json.loads(done.stdout)["dry run"]["rows"]}
    assert {side for side, row in rows.items() if row.get("refused") == OVER} == {*SIDES, *MASKED}


def test_what_was_measured_is_kept_where_a_side_ends_the_process(tmp_path: Path, monkeypatch) -> None:
    """The file has the sides before it, and those of another card; the first sides take the place of what was there."""
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({"H100": {"rows": []}, "dry run": {"rows": [{"side": "float8", "ms": 1.0}]}}))

    def ends(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.gpu.trained", ends)
    with pytest.raises(KeyboardInterrupt):
        gpu(out=out, sides="first", dry_run=True, layouts=None, limit_s=100.0, turns=2, block=1, kernels=False)
    found = json.loads(out.read_text())
    assert found["H100"] == {"rows": []}
    assert found["dry run"]["before"] == [{"side": "float8", "ms": 1.0}]
    assert [row["side"] for row in found["dry run"]["rows"]] == [PLAIN, COMPILED[PLAIN]]


def test_further_sides_are_added_to_the_first_ones() -> None:
    book = Book(None, "H100", {}, {"rows": [{"side": PLAIN, "ms": 1.0}, {"side": "float8", "refused": OVER}]})
    book.note("rows", "side", [{"side": "float8", "ms": 2.0}, {"side": "2:4", "ms": 3.0}])
    assert [row["side"] for row in book.measured["rows"]] == ["float8", "2:4"]  # the others are not compared again
    rows = json.loads(book.text)["H100"]["rows"]
    assert rows == [{"side": PLAIN, "ms": 1.0}, {"side": "float8", "ms": 2.0}, {"side": "2:4", "ms": 3.0}]


def test_the_sides_that_matter_most_are_measured_first(tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = [*openings(Setting(torch.device("cpu"), DRY, tmp_path, stack))]
    assert names[: len(FIRST)] == list(FIRST)


PYTHON = """#!/bin/sh
case "$*" in
  *m.version*) exit 1 ;;
  *find_spec*) exit 0 ;;
esac
echo "$*" >> called
case "$*" in
  *$FAILS*) exit 139 ;;
esac
"""
"""In the place of a Python: what it was asked for, in the order of the script. The process that has `$FAILS` dies."""


@pytest.mark.parametrize(("fails", "seconds"), [("no part", 240), ("--sides first", 240), ("pytest", 240), ("", 5)])
def test_a_part_that_dies_takes_nothing_from_the_others(tmp_path: Path, fails: str, seconds: int) -> None:
    """What matters most comes first, and the script says in the end what failed, or had no time left."""
    python, tests = tmp_path / "python", tmp_path / "tests"
    python.write_text(PYTHON)
    python.chmod(0o755)
    tests.mkdir()
    (tests / "test_one.py").write_text("pytestmark = pytest.mark.gpu")
    (tests / "test_other.py").write_text("import what_is_not_there")
    (tmp_path / "pyproject.toml").write_text('version = "9.9"\n')
    environment = {**os.environ, "FAILS": fails or "nothing", "SECONDS_LEFT": str(seconds)}
    done = subprocess.run(
        ["sh", str(SCRIPT), str(python)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    called = (tmp_path / "called").read_text()
    order = ["build_ext", "--sides first", "pytest", "--sides others", "--kernels"]
    if seconds == 5:
        assert "no time is left for: speed" in done.stderr
        assert "--sides" not in called
        return
    assert sorted(order, key=called.index) == order
    assert "--layouts docs/benchmarks/gpu.md" in called
    assert "tests/test_one.py" in called
    assert "test_other" not in called
    assert done.returncode == (fails != "no part")
    assert {"--sides first": "speed", "pytest": "tests"}.get(fails, "") in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    with pytest.raises(EnvironmentFault, match="needs an NVIDIA GPU and a PyTorch with CUDA"):
        require_gpu()


def test_figures_are_compared_with_those_of_the_same_card_alone() -> None:
    now = {"rows": [{"side": SHOAL, "ms": 40.0}, {"side": "float8", "refused": "no"}]}
    before = {"rows": [{"side": SHOAL, "ms": 50.0}]}
    assert compared({"H100": before}, "H100", now) == ["shoal: 40.0 ms, 50.0 ms before"]
    assert compared({"H200": before}, "H100", now) == [
        "the figures of H200 are not compared with those of H100: cards differ"
    ]
    assert compared({}, "H100", now) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_table_is_a_run_file(tmp_path: Path, layout: str) -> None:
    """What has not been measured is not refused for its keys; the page has a row for each."""
    (tmp_path / "run.toml").write_text(RUN)
    run_file = load_run(tmp_path / "run.toml", ("run.processes=2", *LAYOUTS[layout]))
    assert run_file.run.processes in (1, 2)
    assert f"| {layout} | `{' '.join(LAYOUTS[layout])}` | the same model |" in page(
        "a card", {layout: "the same model"}
    )
