"""A launch's metrics as numbers, and as pictures."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.launch.output.metric_names import direction
from nblaunch.notebook.charts import (
    COLOURS,
    MAX_LINES,
    MEAN_COLOUR,
    Point,
    Summary,
    colour_of,
    downsampled,
    line_chart,
    mean_of,
    summarise,
)

DETERMINISTIC = settings(derandomize=True, deadline=None)
SVG = "{http://www.w3.org/2000/svg}"
NAN, INF = math.nan, math.inf
ANY_FLOAT = st.floats() | st.sampled_from([0.0, 1e308, -1e308, 5e-324, 1e16, 1e16 + 2])
POINTS = st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT), max_size=30)


def chart(series: dict[int, list[Point]], title: str = "loss") -> ET.Element:
    return ET.fromstring(line_chart(series, mean_of(series), title))


def summary_of(name: str, series: Mapping[int, Sequence[Point]]) -> Summary:
    ((summary,),) = summarise({name: series}, [[name]], {}, ())
    return summary


def strokes(svg: ET.Element, colour: str) -> list[list[Point]]:
    """The lines drawn in a colour, in pixels."""
    drawn = []
    for path in svg.iter(f"{SVG}path"):
        if path.get("stroke") == colour:
            for stroke in (path.get("d") or "").split("M")[1:]:
                drawn.append([(float(x), float(y)) for x, y in (pair.split() for pair in stroke.split("L"))])
    return drawn


def labels(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


# ------------------------------------------------------------------ numbers
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, "up") for name in ("accuracy", "val_accuracy", "Acc", "top-1 acc", "acc@5", "F1", "f1_macro", "mAP")),
        *((name, "up") for name in ("trainAccuracy", "AUC", "BLEU", "IoU", "score")),
        *((name, "down") for name in ("loss", "valLoss", "eval/loss", "RMSE", "error", "accuracy_loss", "perplexity")),
        *((name, "") for name in ("lr", "images/s", "accelerate", "glossy", "", "γ")),
    ],
)
def test_the_words_of_a_name_say_whether_more_is_better(name: str, expected: str) -> None:
    assert direction(name) == expected


def test_the_mean_is_over_the_ranks_at_the_same_x_and_needs_half_of_them() -> None:
    assert mean_of({0: [(0, 1.0), (1, 3.0)], 1: [(1, 5.0), (0, 2.0)]}) == ((0, 1.5), (1, 4.0))
    series = {0: [(0, 1.0), (1, 1.0), (2, 9.0)], 1: [(0, 3.0), (1, 3.0)], 2: [(0, 5.0)]}
    assert mean_of(series) == ((0, 3.0), (1, 2.0))


def test_the_latest_and_the_best_are_the_means() -> None:
    ranks = {0: [(1, 0.5), (2, 0.9), (3, 0.7)], 1: [(1, 0.5), (2, 0.7), (3, 0.7)]}
    accuracy, loss, other = (summary_of(name, ranks) for name in ("accuracy", "loss", "other"))
    assert accuracy.latest == 0.7
    assert accuracy.best == pytest.approx(0.8)
    assert (loss.latest, loss.best) == (0.7, 0.5)
    assert (other.latest, other.best) == (0.7, None)
    assert not accuracy.differs


def test_ranks_that_share_no_x_have_no_mean_but_a_latest_and_a_best() -> None:
    series = {rank: [(10 * rank + step, float(rank + step)) for step in range(3)] for rank in range(3)}
    loss = summary_of("loss", series)
    assert (loss.mean, loss.latest, loss.best) == ((), 3.0, 0.0)
    assert loss.by_rank == {0: 2.0, 1: 3.0, 2: 4.0}
    assert loss.differs


def test_a_loss_that_is_no_number_any_more_says_so_and_keeps_its_best() -> None:
    loss = summary_of("loss", {0: [(0, 2.0), (1, 1.0), (2, NAN)], 1: [(0, 2.0), (1, 1.0), (2, 1.0)]})
    assert math.isnan(loss.latest)
    assert loss.best == 1.0
    lost = summary_of("loss", {0: [(0, NAN), (1, INF)], 1: [(0, NAN), (1, INF)]})
    assert (lost.latest, lost.best, lost.differs) == (INF, None, False)


# ------------------------------------------------------------------ fewer points


def test_a_long_series_keeps_its_ends_extremes_and_gaps() -> None:
    points = [(float(i), math.sin(i)) for i in range(20_000)]
    points[777], points[12_345], points[15_000] = (777.0, 50.0), (12_345.0, -50.0), (15_000.0, NAN)
    kept = downsampled(points)
    assert 100 <= len(kept) <= 300
    assert {points[0], points[-1], points[777], points[12_345], points[15_000]} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@DETERMINISTIC
@given(st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT), max_size=200), st.integers(5, 60))
def test_the_limit_holds_and_the_extremes_stay(points: list[Point], most: int) -> None:
    kept = downsampled(points, most)
    assert len(kept) <= most
    assert {id(point) for point in kept} <= {id(point) for point in points}
    assert kept[:1] == points[:1]
    assert kept[-1:] == points[-1:]
    drawable = [y for x, y in points if abs(x) < 1e300 and abs(y) < 1e300]
    left = [y for x, y in kept if abs(x) < 1e300 and abs(y) < 1e300]
    assert not drawable or (min(left), max(left)) == (min(drawable), max(drawable))


# ------------------------------------------------------------------ pictures
def test_each_rank_has_its_own_colour_and_the_mean_is_on_top() -> None:
    svg = chart({0: [(0, 0.0), (1, 1.0)], 1: [(0, 2.0), (1, 3.0)]})
    (first,), (second,), (mean,) = (strokes(svg, colour) for colour in (colour_of(0), colour_of(1), MEAN_COLOUR))
    assert [x for x, _ in first] == [x for x, _ in second] == [x for x, _ in mean]
    for lower, between, upper in zip(first, mean, second, strict=True):
        assert lower[1] > between[1] > upper[1]  # SVG counts downwards
    assert list(svg)[-1].get("stroke") == MEAN_COLOUR


def test_the_axes_have_round_numbers() -> None:
    svg = chart({0: [(0, 0.31), (400, 0.97)]})
    assert labels(svg) == ["0.4", "0.6", "0.8", "0", "100", "200", "300", "400"]


def test_a_point_that_is_no_number_leaves_a_gap_and_the_axis_goes_on() -> None:
    svg = chart({0: [(0, 1.0), (1, 2.0), (2, NAN), (3, 2.0), (4, 3.0), (5, INF), (10, NAN)]})
    first, second = strokes(svg, colour_of(0))
    assert (len(first), len(second)) == (2, 2)
    assert second[-1][0] < 200
    assert "10" in labels(svg)


def test_of_many_ranks_the_first_and_the_mean_are_drawn() -> None:
    svg = chart({rank: [(float(x), float(rank)) for x in range(500)] for rank in range(MAX_LINES + 1)})
    assert sum(len(strokes(svg, colour)) for colour in COLOURS) == MAX_LINES
    assert len(strokes(svg, MEAN_COLOUR)) == 1


@pytest.mark.parametrize(
    ("values", "ends"),
    [((5e-324, 1.0), ("1e-307", "1e-37")), ((1.0, 9e299), ("1", "1e+250")), ((1e-300, 9e299), ("1e-300", "1e+200"))],
)
def test_a_loss_of_all_magnitudes_is_drawn(values: tuple[float, float], ends: tuple[str, str]) -> None:
    svg = ET.fromstring(line_chart({0: [(0, values[0]), (1, values[1])]}, (), "loss", way="down"))
    ticks = labels(svg)[: labels(svg).index("log scale")]
    assert (ticks[0], ticks[-1]) == ends
    assert 2 <= len(ticks) <= 7


def test_no_grid_line_strikes_through_the_words_of_a_logarithmic_scale() -> None:
    svg = line_chart({0: [(0, 1.0), (1, 0.01)]}, (), "loss", way="down")
    lines = [float(at) for at in re.findall(r'd="M46 ([\d.]+)H332"', svg)]
    (words,) = re.findall(r'y="(\d+)"[^>]*>log scale<', svg)
    assert lines
    assert min(lines) > int(words) + 3  # below the baseline


@DETERMINISTIC
@given(st.dictionaries(st.integers(0, 20), POINTS, max_size=20), st.text() | st.just("]]></title><script>"))
def test_whatever_is_drawn_is_well_formed_and_within_the_picture(series: dict[int, list[Point]], title: str) -> None:
    svg = chart(series, title)
    assert {element.tag for element in svg.iter()} <= {f"{SVG}{name}" for name in ("svg", "title", "path", "text")}
    for path in svg.iter(f"{SVG}path"):
        numbers = [float(text) for text in re.findall(r"-?(?:nan|inf|[\d.]+)", path.get("d") or "")]
        assert all(0 <= value <= 340 for value in numbers)
    assert "nan" not in "".join(labels(svg))
