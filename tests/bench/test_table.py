"""The rows of a benchmark as people read them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shoal.bench.report import FEW_ROWS, WIDEST_LINE, cell, heading, tables


@pytest.mark.parametrize(
    ("key", "value", "words", "figure"),
    [
        ("bytes", 64 << 20, "size", "64 MiB"),
        ("ledger_bytes", 1536, "ledger", "1.50 KiB"),
        ("time_us", 45.02, "time", "45.0 µs"),
        ("no_communication_ms", 1234.0, "no communication", "1.23 s"),
        ("alpha_s", 4.5e-05, "start-up (alpha)", "45.0 µs"),
        ("beta_s", 1.2e-09, "per byte (beta)", "1.20 ns"),
        ("busbw_gb_s", 3.0227, "bus bandwidth", "3.02 GB/s"),
        ("algbw_gb_s", 0.0019, "bandwidth", "1.9 MB/s"),
        ("sent_mb", 2100.0, "sent", "2.1 GB"),
        ("gflops_s", 12.5, "rate", "12.5 GFLOP/s"),
        ("shoal_page_faults_per_s", 31_000, "shoal page faults a second", "31,000"),
        ("zero_1_ratio_lower_95", 1.08, "ZeRO-1 ratio, 95 % bound", "1.08"),
        ("ddp_twin_ms", None, "DDP again", "-"),
        ("aa_spread", [0.97, 1.13], "A/A spread", "0.97 to 1.13"),
        ("phases_s", [0.5, 2.0], "phases", "500 ms, 2 s"),
        ("chosen", True, "chosen", "yes"),
        ("strategy", "server-backup", "strategy", "server-backup"),
    ],
)
def test_a_key_is_words_and_its_figure_has_the_unit(key: str, value: Any, words: str, figure: str) -> None:
    """No underscores, no None, no unit that has to be converted."""
    assert (heading(key), cell(key, value)) == (words, figure)


def test_what_all_rows_share_stands_above_them_once() -> None:
    rows = [{"side": side, "ranks": 2, "step_ms": ms} for side, ms in (("ours", 80.0), ("peer", 90.5))]
    assert list(tables(rows)) == ["ranks: 2\nside     step\nours    80 ms\npeer  90.5 ms"]


def test_rows_of_other_keys_are_another_table() -> None:
    assert list(tables([{"a": 1}, {"b": 2}])) == ["a\n1", "b\n2"]


@pytest.mark.parametrize("count", [1, 2])
def test_few_rows_that_are_too_long_for_a_line_are_columns(count: int) -> None:
    """Each figure beside its words, and nothing is lost."""
    rows = [{f"a_figure_with_a_long_name_{n}_ms": float(n + row) for n in range(20)} for row in range(count)]
    (table,) = tables(rows)
    lines = table.splitlines()
    assert len(lines) == 20
    assert max(map(len, lines)) < WIDEST_LINE
    assert [len(re.findall(r"\d+ m?s|\b0 s", line)) for line in lines] == [count] * 20


def test_many_rows_keep_their_lines() -> None:
    rows = [{f"a_figure_with_a_long_name_{n}": 20 * row + n for n in range(20)} for row in range(FEW_ROWS + 1)]
    (table,) = tables(rows)
    assert len(table.splitlines()) == 1 + len(rows)
