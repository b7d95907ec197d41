"""What the page shows in a real browser is what the events say. Needs Chromium and the package playwright."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shoal.launcher.lock import RunLock
from shoal.observe.events import EventWriter
from shoal.observe.facts import write_facts
from shoal.resilience.hang_verdict import HangVerdict, write_verdict
from tests.page.runs import START_S, STEP_S, loss, values, write_run
from tests.page.watching import watching
from tests.waiting import HANG_S

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

TOO_NEW = {"body": "const run = new = ;", "content_type": "text/javascript"}
"""A script with words that a browser does not know."""


def figures(page: Any, run: int = 0) -> dict[str, str]:
    """The figures of a run's card by name."""
    cells = page.locator(".run").nth(run).locator(".figures > div")
    return {cell.locator("dt").inner_text(): cell.locator("dd").inner_text().split("\n")[0] for cell in cells.all()}


def readout(page: Any, title: str, *keys: str) -> str:
    """What a chart says of the step that these keys lead to."""
    figure = page.locator("figure", has=page.get_by_role("heading", name=title, exact=True))
    plot = figure.locator(".plot")
    plot.focus()
    for key in keys:
        plot.press(key)
    return " · ".join(figure.locator("output > span").all_inner_texts())


@pytest.mark.slow
def test_figures_and_curves_are_those_of_the_events(tmp_path: Path, opened: Any) -> None:
    """Newest figures, the first and a middle step of the loss, the held-out loss, a step that was not finite."""
    write_run(tmp_path, steps=60, planned=100, nan_at=31)
    with watching(tmp_path) as (address, _):
        page = opened(address)
        shown = figures(page)
        assert shown["training loss"] == f"{loss(60):.4g}".ljust(5, "0")
        assert shown["held-out loss"] == f"{loss(60) + 0.1:.4g}".ljust(5, "0")
        assert shown["tokens/s"] == "20.5k"
        assert shown["step"] == "100 ms"
        assert shown["peak memory"] == "103 MiB"
        assert page.locator(".position").inner_text() == "step 60 of 100"
        assert readout(page, "Loss", "Home") == f"step 60 · training {loss(60):.4g} · held out {loss(60) + 0.1:.4g}"
        assert readout(page, "Loss", "Home") == f"step 1 · training {loss(1):.4g}"
        assert readout(page, "Loss", *["ArrowRight"] * 30) == "step 31 · training not finite"
        assert readout(page, "Learning rate", "End") == "step 60 · 0.001"
        page.locator("figure .plot").first.blur()
        assert "not finite" in page.locator("figure.large output").inner_text()
        text = page.locator("#notices").inner_text()
        assert "killed" in text
        assert (
            "1 step had a loss or a gradient norm that was not finite, and changed no weight; the last was step 31."
            in text
        )


@pytest.mark.slow
def test_ticks_that_lie_close_together_have_labels_of_their_own(tmp_path: Path, opened: Any) -> None:
    """A held-out accuracy of a single evaluation: the axis spans two percent, in steps of half a percent."""
    write_run(tmp_path, steps=30, planned=99)
    with watching(tmp_path) as (address, _):
        figure = opened(address).locator("figure", has_text="Held-out accuracy")
        labels = figure.locator(".y").all_inner_texts()
        assert len(labels) > 3
        assert len(set(labels)) == len(labels)


@pytest.mark.slow
def test_labels_of_axes_are_short_true_and_few(tmp_path: Path, opened: Any) -> None:
    """A loss that rises to 1e15 has at most seven of them, which lie within the card; no accuracy is above 100 %."""
    with EventWriter(tmp_path, rank=0) as writer:
        for step in range(1, 16):
            measured = {"loss/train": 10.0**step, "accuracy/eval": 0.98}
            writer.write(step, measured, time_s=START_S + STEP_S * step)
    with watching(tmp_path) as (address, _):
        page = opened(address)
        figure = page.locator("figure.large")
        assert figure.locator(".y").all_inner_texts() == ["1000", "1e6", "1e9", "1e12", "1e15"]
        left = page.locator("#curves").bounding_box()["x"]
        assert all(label.bounding_box()["x"] > left for label in figure.locator(".y").all())
        labels = page.locator("figure", has_text="Held-out accuracy").locator(".y").all_inner_texts()
        assert labels
        assert all(float(label.removesuffix(" %")) <= 100 for label in labels)
        assert figures(page)["accuracy"] == "98 %"


@pytest.mark.slow
def test_how_a_run_ended_is_said_once(tmp_path: Path, opened: Any) -> None:
    """Not again as a line of a log."""
    write_run(tmp_path, steps=30, planned=99)
    cause = "5 steps in a row were not finite"
    write_facts(tmp_path, {"state": "diverged", "failure": {"rank": 0, "exit_code": 4, "cause": cause}})
    (tmp_path / "logs").mkdir()
    said = f"2026-11-28T14:07:34.000Z  rank 0  ERROR    diverged: {cause}\n"
    (tmp_path / "logs/rank-00000.log").write_text(said + said.replace(cause, "something else"))
    with watching(tmp_path) as (address, _):
        shown = opened(address).locator("#notices .notice span").all_inner_texts()
        assert sum(cause in text for text in shown) == 1
        assert sum("something else" in text for text in shown) == 1


@pytest.mark.slow
def test_the_slow_rank_is_named_in_words_and_in_the_map(tmp_path: Path, opened: Any) -> None:
    """The sentence, the table and the cells of the map agree on rank 2, forward and backward, from step 41 on."""
    write_run(tmp_path, steps=90, planned=90, slow={2: 41})
    with watching(tmp_path) as (address, _):
        page = opened(address)
        lead = page.locator("#ranks .lead").inner_text()
        assert lead == ("Rank 2 is the slowest now: 60 % more work of its own than the median rank, "
                        "most of it in forward and backward.")  # fmt: skip
        assert page.locator("#ranks tbody tr").inner_text().split("\t") == ["2", "60 %", "forward and backward", "41"]
        canvas = page.locator("#ranks canvas")
        canvas.focus()
        said = []
        for key in ("End", "ArrowDown", "ArrowDown", "Home"):
            canvas.press(key)
            said.append(page.locator("#ranks output").inner_text())
        assert said[0].startswith("rank 0, step 90: 0.0 % of a median step more")
        assert said[2] == "rank 2, step 90: 40 % of a median step more than the median rank"
        assert said[3].startswith("rank 2, step 1: 0.0 %")
        page.get_by_text("waiting for data", exact=True).first.click()
        canvas.focus()
        canvas.press("End")
        canvas.press("ArrowDown")
        assert "0.0 % of a median step" in page.locator("#ranks output").inner_text()


@pytest.mark.slow
def test_a_slow_rank_a_lost_rank_and_a_nan_are_told_in_sentences(tmp_path: Path, opened: Any) -> None:
    """While the run goes on: whose work takes longer, who has gone silent, which step was skipped; the skipped step is
    no gap in the others' curves, and the row of the lost rank ends."""
    write_run(tmp_path, steps=60, planned=99, slow={2: 21}, nan_at=31)
    for rank in (0, 2, 3):  # rank 1 is lost
        with EventWriter(tmp_path, rank=rank) as writer:
            for step in range(61, 91):
                writer.write(step, values(step, rank, 21 if rank == 2 else 99, None), time_s=time.time() + HANG_S)
    with RunLock(tmp_path), watching(tmp_path) as (address, _):
        page = opened(address)
        assert page.locator(".run .state").inner_text() == "running"
        lost, slow, skipped = page.locator("#notices .notice span").all_inner_texts()
        assert lost.startswith("Rank 1 has recorded nothing for ")
        assert lost.endswith("; its last step was 60.")
        assert slow.startswith("Rank 2 is slow: its own work takes 60 % more than the median rank's")
        assert slow.endswith("most of it in forward and backward, since about step 21.")
        assert skipped == (
            "1 step had a loss or a gradient norm that was not finite, and changed no weight; the last was step 31."
        )
        canvas = page.locator("#ranks canvas")
        canvas.focus()
        canvas.press("End")
        canvas.press("ArrowDown")
        assert page.locator("#ranks output").inner_text() == "rank 1, step 90: nothing recorded"


@pytest.mark.slow
def test_replicas_that_were_lost_are_told_and_not_counted(tmp_path: Path, opened: Any) -> None:
    """Of an elastic run: each change of the membership, the newest first; the ranks that are left are not silent."""
    write_run(tmp_path, steps=60, planned=99, ranks=4)
    changes = ["", "3 of 4 replicas; rank 1 lost after step 20", "4 of 4 replicas; rank 3 joined after step 40",
               "3 of 4 replicas; rank 2 lost after step 60"]  # fmt: skip
    write_facts(tmp_path, {"membership": [{"generation": i, "change": change} for i, change in enumerate(changes)]})
    write_facts(tmp_path, {"world": 3})
    for rank in range(3):
        with EventWriter(tmp_path, rank=rank, generation=3) as writer:
            writer.write(61, values(61, rank, 99, None), time_s=time.time() + HANG_S)
    with RunLock(tmp_path), watching(tmp_path) as (address, _):
        page = opened(address)
        assert page.locator("#notices .notice span").all_inner_texts() == [f"{one}." for one in changes[:0:-1]]
        assert page.locator("#notices .notice b").all_inner_texts() == ["warning", "note", "warning"]
        assert figures(page)["ranks"] == "3"
        assert "started" not in page.locator(".run").inner_text()


@pytest.mark.slow
def test_the_verdict_on_a_hang_is_told_and_no_time_is_left(tmp_path: Path, opened: Any) -> None:
    """The sentence of `hang.json` appears when it is written, once, though the log has it too; how much time is left is
    not said any more. When a step follows, both are as before."""
    write_run(tmp_path, steps=30, planned=99)
    sentence = "rank 1 (node7) is in no collective at own.py:92 (locks); for it wait ranks 0, 2, 3"
    with RunLock(tmp_path), watching(tmp_path) as (address, _):
        page = opened(address)
        expect = playwright.expect
        expect(page.locator(".position")).to_contain_text(" left")
        write_verdict(tmp_path, HangVerdict((1,), None, sentence))
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs/rank-00000.log").write_text(f"2026-11-23T10:00:00.000Z  rank 0  WARNING  {sentence}\n")
        expect(page.locator("#notices .notice.failure span").first).to_have_text(f"The run hangs: {sentence}")
        expect(page.locator(".position")).to_have_text("step 30 of 99")
        expect(page.get_by_text(sentence)).to_have_count(1)
        with EventWriter(tmp_path, rank=0) as writer:
            writer.write(31, values(31, 0, 99, None), time_s=time.time() + 1)
        expect(page.locator(".position")).to_contain_text("step 31 of 99, ")
        expect(page.get_by_text("The run hangs")).to_have_count(0)


@pytest.mark.slow
def test_goodput_communication_and_experts(tmp_path: Path, opened: Any) -> None:
    """The waterfall of a restarted run, the collectives of a mean step, and an expert's load over the mean."""
    write_run(tmp_path, steps=60, restart_at=30)
    with watching(tmp_path) as (address, _):
        page = opened(address)
        parts = {row.get_attribute("data-part"): row.inner_text().split("\n") for row in page.locator(".fall").all()}
        assert parts["restarting"] == ["restarting", "61 %", "10 s"]
        assert parts["redone"] == ["steps redone", "3.0 %", "500 ms"]
        shown = [row.split("\t") for row in page.locator("#communication tbody tr").all_inner_texts()]
        assert shown == [
            ["all-reduce", "3.65 MB", "20 ms", "10 ms"],
            ["inside a host", "2.65 MB", "26.5 MB/s"],
            ["between hosts", "1 MB", "10 MB/s"],
        ]
        canvas = page.locator("#experts canvas")
        for key in ("End", "ArrowDown", "ArrowDown"):
            canvas.press(key)
        assert page.locator("#experts output").inner_text() == "expert 2, steps 51 to 60: 1.5 times the mean load"


@pytest.mark.slow
def test_the_page_follows_the_run_without_a_reload(tmp_path: Path, opened: Any) -> None:
    """A new line in the events is shown, and a server that ends is said."""
    write_run(tmp_path, steps=10, planned=99)
    with watching(tmp_path) as (address, process):
        page = opened(address)
        with EventWriter(tmp_path, rank=0) as writer:
            writer.write(11, values(11, 0, 99, None) | {"loss/train": 1.25}, time_s=START_S + 11 * STEP_S)
        playwright.expect(page.locator(".position")).to_have_text("step 11 of 99")
        assert figures(page)["training loss"] == "1.250"
        process.terminate()
        playwright.expect(page.locator("#link")).to_have_text("not connected")


@pytest.mark.slow
def test_several_runs_are_side_by_side(tmp_path: Path, opened: Any) -> None:
    """A card each, curves that name their run, the keys that differ, and the details of the run that is chosen."""
    write_run(tmp_path / "a", name="first", ranks=2)
    write_run(tmp_path / "b", name="<b>second</b>", ranks=3, lr=0.002, slow={1: 5})
    with watching(tmp_path / "a", tmp_path / "b") as (address, _):
        page = opened(address)
        assert page.locator(".run h2").all_inner_texts() == ["first", "<b>second</b>"]
        assert page.locator("#keys tbody tr").inner_text().split("\t") == ["optimizer.lr", "0.001", "0.002"]
        said = readout(page, "Learning rate", "End")
        assert said == "step 60 · first 0.001 · <b>second</b> 0.002"
        assert "even" in page.locator("#ranks .lead").inner_text()
        page.locator(".run button").nth(1).press("Enter")
        assert page.locator("#ranks .lead").inner_text().startswith("Rank 1 is the slowest now")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(tmp_path: Path, opened: Any, scheme: str) -> None:
    """At 380 pixels nothing is wider than the screen; colours follow the light or dark that the device asks for."""
    write_run(tmp_path, ranks=6, slow={3: 20}, restart_at=40, nan_at=30)
    with watching(tmp_path) as (address, _):
        page = opened(address, viewport={"width": 380, "height": 800}, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == 380
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(12, 21, 25)"
        assert dark == (scheme == "dark")


@pytest.mark.slow
def test_a_browser_that_cannot_draw_the_page_is_told_so(tmp_path: Path, browser: Any) -> None:
    """One that is too old for the script reads that it is, one without scripts that they are needed; both are told of
    the report, which needs none. One that draws the page reads neither."""
    write_run(tmp_path, steps=10)
    old, without = "#old", "noscript .notice"
    with watching(tmp_path) as (address, _):
        for is_old, has_scripts, told in ((False, True, []), (True, True, [old]), (False, False, [without])):
            context = browser.new_context(java_script_enabled=has_scripts)
            page = context.new_page()
            if is_old:
                page.route("**/page.js", lambda route: route.fulfill(**TOO_NEW))
            page.goto(address)
            if not told:
                page.wait_for_selector(".run")
            assert [notice for notice in (old, without) if page.locator(notice).is_visible()] == told
            assert all("shoal report" in page.locator(notice).inner_text() for notice in told)
            context.close()
