"""A real browser: Chromium, driven by the package playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    playwright.expect.set_options(timeout=1e3 * HANG_S)
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """`opened(address, **options)` is a page that has drawn its first snapshot; its scripts raise nothing."""
    contexts, errors = [], []

    def goto(address: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(1e3 * HANG_S)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector(".run")
        return page

    yield goto
    for context in contexts:
        context.close()
    assert not errors
