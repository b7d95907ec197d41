"""The form in which benchmarks report."""

from __future__ import annotations

import json

import pytest

from shoal.bench.report import check, merged, print_report

RESULT = {"rows": [{"bytes": 4, "time_ms": 1.5}, {"bytes": 64, "time_ms": 2.5}], "checks": [check("speed", 0.9, 1.0)]}


def test_json_is_one_object_with_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts find the rows and checks as they were measured."""
    print_report("made-up", RESULT, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"bench", "machine", "rows", "checks"}
    assert report["bench"] == "made-up"
    assert {"processor", "cores", "memory_bytes", "python", "torch", "shoal"} == set(report["machine"])
    assert {key: report[key] for key in RESULT} == RESULT


def test_text_has_a_heading_for_rows_of_the_same_keys_and_marks_what_does_not_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report("made-up", merged([RESULT, {"rows": [{"other": 1}], "checks": []}]), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["size", "time"],
        ["4", "B", "1.50", "ms"],
        ["64", "B", "2.50", "ms"],
    ]
    assert [line.strip() for line in lines[4:6]] == ["other", "1"]
    assert lines[-1] == "SHORT  speed: 0.9 (bound 1.0)"


def test_results_are_merged_in_order() -> None:
    assert merged([RESULT, RESULT])["rows"] == 2 * RESULT["rows"]
    assert len(merged([RESULT, RESULT])["checks"]) == 2
