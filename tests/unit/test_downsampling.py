"""Fewer points of a series: what must survive."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.launch.views import LaunchInfo
from nblaunch.notebook.charts import Point, downsampled
from nblaunch.notebook.panel_state import PanelState
from nblaunch.notebook.record import record_of

DETERMINISTIC = settings(derandomize=True, deadline=None)
NAN = math.nan
ANY_FLOAT = st.floats() | st.sampled_from([0.0, 1e308, -1e308, 5e-324, 1e16, 1e16 + 2])


def test_a_short_series_stays_as_it_is() -> None:
    points = [(float(i), NAN if i == 3 else 1.0) for i in range(300)]
    assert downsampled(points) == points


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


def test_a_gap_survives_into_the_record() -> None:
    """The panel downsamples once a series has more than 2,000 points, the record again to 300."""
    state = PanelState(1)
    info = LaunchInfo("abc", "train", 1, "cpu", "forkserver", Path("/logs"))
    state.start(info)
    for step in range(10_000):
        loss = NAN if 5_000 <= step < 5_100 else 1 / (step + 1)
        state.add_reports(0, [{"time": 0.0, "step": step, "metrics": {"loss": loss}}])
    points = record_of(state, info, 1.0).metrics["loss"][0]
    assert len(points) <= 300
    assert any(math.isnan(loss) and 5_000 <= step < 5_100 for step, loss in points)
