"""The report in a real browser, as narrow as a phone. Needs Chromium and the package playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.facts import write_facts
from shoal.observe.report import write_report
from shoal.observe.sink import Ending, write_ending
from tests.page.runs import write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: apt-get install chromium")
PHONE = 390
OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter((element) => {
    const box = element.getBoundingClientRect();
    const hidden = box.width === 0 || element.closest("pre, .tabs > input");
    return !hidden && (box.right > innerWidth || box.left < 0);
}).map((element) => `${element.tagName}.${element.className}: ${element.textContent.slice(0, 60)}`)"""
SCROLLING = """() => [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth)
    .map((box) => box.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


def write_everything(directory: Path) -> None:
    """A run with every section that the report has, long names and large numbers among them."""
    write_run(directory, name="a-run-with-a-name-that-is-long", ranks=6, slow={3: 20}, restart_at=40, nan_at=30,
              steps=60, planned=12_345_678)  # fmt: skip
    facts = {
        "baseline": {"name": "bigram", "loss": 2.5},
        "samples": [{"step": 40, "prompt": "def ", "text": "def f(" + "argument, " * 30 + "):\n    return 1"}],
        "prediction": "From the steps that earlier runs of this model took on this machine.",
        "time/step_predicted": 0.0981,
        "memory/peak_bytes_predicted": 1.1e8,
        "parameters": 912_384_000_123,
        "data/source": "/very/long/path/without/a/place/to/break/" + "x" * 80,
        "torch": "2.13.0+cpu.with.a.local.version.that.is.long",
    }
    write_facts(directory, facts)
    write_ending(directory, Ending("failed", "ArithmeticError: " + "a_mistake_without_a_space_" * 6, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(tmp_path: Path, browser: Any, scheme: str) -> None:
    """At 390 pixels no element crosses the edge of the screen, and no table has to be moved sideways to be read; lines
    of code alone may."""
    write_everything(tmp_path)
    page = browser.new_page(viewport={"width": PHONE, "height": 844}, color_scheme=scheme)
    page.goto(write_report(tmp_path).as_uri())
    titles = page.locator("h2").all_inner_texts()
    for needed in ("Where the time went", "Communication", "Rank by rank", "As predicted?", "Evaluation", "Starts"):
        assert needed in titles
    for tab in page.locator(".tabs > label").all():
        tab.click()
        assert page.evaluate(SCROLLING) == []
        assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE
    page.close()


def test_a_row_of_a_wide_table_is_a_card_with_labels(tmp_path: Path, browser: Any) -> None:
    """On a phone the head of a wide table is not shown, and each cell says what it is; on a desk the head is there."""
    write_everything(tmp_path)
    address = write_report(tmp_path).as_uri()
    for width, head in ((PHONE, False), (1200, True)):
        page = browser.new_page(viewport={"width": width, "height": 844})
        page.goto(address)
        ranks = page.locator("section", has=page.get_by_role("heading", name="Rank by rank"))
        assert ranks.locator("thead").is_visible() == head
        label = "(cell) => getComputedStyle(cell, '::before').content"
        assert (ranks.locator("tbody td").nth(1).evaluate(label) != "none") != head
        page.close()
