"""The report shows how loaded each expert was, from the events of whichever rank recorded it."""

from __future__ import annotations

import math
import re
from pathlib import Path

from shoal.observe.events import Event, EventWriter
from shoal.observe.record import layer_loads, mean_imbalance
from shoal.observe.report import write_report
from shoal.observe.report_experts import MAX_COLUMNS, heat_map
from tests.observe.synthetic import write_run


def event(step: int, *tokens: float, name: str = "blocks.1") -> Event:
    return Event(step=step, time_s=0.0, values={f"moe/load/{name}/{e}": t for e, t in enumerate(tokens)})


def test_loads_are_read_by_step_and_expert() -> None:
    """Imbalance is the busiest expert's total over the mean of all."""
    (layer,) = layer_loads([event(10, 4, 2), event(11), event(20, 8, 2)])
    assert (layer.name, list(layer.steps), layer.experts, layer.totals) == ("blocks.1", [10, 20], 2, [12, 4])
    assert layer.imbalance == 1.5


def test_a_step_is_uneven_though_its_experts_take_turns() -> None:
    """Each expert is the fullest in its turn: even in total, and every step waits for one with 1.5 times the mean."""
    layers = layer_loads([event(10, 3, 1), event(20, 1, 3), event(30, 3, 1), event(40, 1, 3)])
    assert (layers[0].imbalance, layers[0].step_imbalance) == (1.0, 1.5)
    assert mean_imbalance([*layers, *layer_loads([event(10, 2, 2)])]) == 1.25
    assert mean_imbalance([]) == 1.0


def test_the_later_life_counts_and_torn_records_do_not() -> None:
    """A life that goes on after step 10 voids what came behind it; a record that lacks an expert or a token is none."""
    lives = [event(10, 1, 1), event(20, 9, 1), Event(step=10, time_s=0.0), event(20, 3, 1)]
    (layer,) = layer_loads(lives)
    assert list(zip(layer.steps, layer.tokens, strict=True)) == [(10, [1, 1]), (20, [3, 1])]
    gap = Event(step=30, time_s=0.0, values={"moe/load/blocks.1/1": 2.0, "moe/load/blocks.1/x": 2.0})
    assert list(layer_loads([event(10, 1, 1), gap, event(40, math.nan, 1), event(50, 0, 0)])[0].steps) == [10]
    assert layer_loads([gap]) == []


def test_a_heat_map_shades_by_load_and_stays_small() -> None:
    """0 is the lightest shade, the hottest and above the darkest; long rows are shown by means of neighbours."""
    drawn = heat_map("map", [[0.0, 2.0], [9.0, 1.0]], hottest=2.0, labels=["<a>", "b"])
    shades = dict(re.findall(r'class="heat h(\d)" d="([^"]+)"', drawn))
    assert shades == {"0": "M0,0h1v1h-1z", "8": "M1,0h1v1h-1zM0,1h1v1h-1z", "4": "M1,1h1v1h-1z"}
    assert "&lt;a&gt;" in drawn
    assert f'viewBox="0 0 {MAX_COLUMNS} 1"' in heat_map("map", [[1.0] * 1000], hottest=2.0, labels=["a"])


def test_the_page_shows_the_mixtures_of_all_ranks(tmp_path: Path) -> None:
    """One of rank 0 and one of a later stage, escaped, with busiest and idlest; without mixtures no section."""
    write_run(tmp_path)
    assert "<h2>Experts</h2>" not in write_report(tmp_path).read_text()
    for rank, name in ((0, "blocks.0"), (1, "<b>")):
        with EventWriter(tmp_path, rank=rank) as writer:
            for step in (50, 60):
                values = {f"moe/load/{name}/{e}": float(t) for e, t in enumerate((6, 1, 5))}
                values |= {"moe/load_max_over_mean": 1.5, "moe/load_max_over_mean_average": 1.5}
                writer.write(step, values | {"moe/dropped_share": 0.125}, time_s=1.8e9 + step)
    page = write_report(tmp_path).read_text()
    assert "<h2>Experts</h2>" in page
    assert page.count('class="heats"') == 2
    assert "<b>, 3 experts" not in page
    assert re.search(
        r"<th[^>]*>blocks\.0</th><td[^>]*>0</td><td[^>]*>1\.50</td><td[^>]*>1</td><td[^>]*>0\.25</td>", page
    )
    for expected in (">expert</span>", ">step 50</span>", ">step 60</span>", "2 × mean or more"):
        assert expected in page
    for expert, share in enumerate(("1.50", "0.25", "1.25")):
        assert page.count(f"expert {expert}: {share} times the mean load") == 2
    assert "Choices without room" in page
