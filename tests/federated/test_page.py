"""The page of a federated run says what its report does, and lets nothing from a file out as HTML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CorruptCheckpoint, UsageError
from shoal.federated.page import page, write_page
from shoal.federated.report import RoundFigures, result_of


def result(**facts: Any) -> dict[str, Any]:
    """Three rounds of four clients, of which one is lost in the second."""
    rows = [
        RoundFigures(1, 2.0, 4, 4, up_bytes=400, down_bytes=400, values={"loss/train": 2.0, "accuracy/eval": 0.25}),
        RoundFigures(2, 5.0, 4, 3, lost=1, up_bytes=300, down_bytes=400, values={"loss/train": 1.5}),
        RoundFigures(3, 7.0, 4, 4, up_bytes=400, down_bytes=400, attempts=2, values={"accuracy/eval": 0.75}),
    ]
    clients = {"samples": [10, 20, 30, 40], "rounds": [3, 3, 2, 3], "accuracy": [0.9, 0.2, 0.7, 0.8]}
    facts = {"name": "a <b>run</b>", "strategy": "fedavg", "clients_enrolled": 4, **facts}
    return result_of(rows, facts=facts, clients=clients, refused=["client <i>x</i> sent nonsense"])


def test_the_page_has_every_section_with_its_figures() -> None:
    shown = page(result())
    for text in ("The model", "Taking part", "Fairness", "Rounds", "Refused", "1 attempt failed"):
        assert text in shown, text
    assert "<dt>Held-out accuracy</dt><dd>75" in shown
    assert "<dt>Worst client&#x27;s accuracy</dt><dd>20" in shown
    assert "11<small>91.7 % of those asked" in shown or "11<small>92 % of those asked" in shown
    assert "Rounds in which a client counted" in shown
    assert "Privacy" not in shown


def test_privacy_is_shown_with_its_budget() -> None:
    privacy = {"unit": "client", "epsilon": 3.25, "epsilon_prv": 3.0, "budget": 8.0, "delta": 1e-5, "noise": 1.0}
    shown = page(result(privacy=privacy))
    assert "<dt>Epsilon</dt><dd>3.25<small>of 8, delta 1e-05" in shown
    assert "one client is bounded by epsilon" in shown


def test_text_from_files_is_escaped() -> None:
    shown = page(result())
    assert "<b>run</b>" not in shown
    assert "a &lt;b&gt;run&lt;/b&gt;" in shown
    assert "client &lt;i&gt;x&lt;/i&gt; sent nonsense" in shown
    assert "script" not in shown


def test_a_server_that_sees_no_samples_has_no_fairness() -> None:
    one = result_of([RoundFigures(1, 1.0, 2, 2)], facts={"name": "n", "strategy": "s"}, clients={}, refused=[])
    assert "Fairness" not in page(one)
    assert "Refused" not in page(one)
    assert "Taking part" in page(one)


def test_the_page_is_written_beside_the_report(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no federated run has ended there"):
        write_page(tmp_path)
    (tmp_path / "federated.json").write_text(json.dumps(result()))
    assert write_page(tmp_path).read_text() == page(result())
    (tmp_path / "federated.json").write_text('{"rounds": 3}')
    with pytest.raises(CorruptCheckpoint, match="no report of this version"):
        write_page(tmp_path)
