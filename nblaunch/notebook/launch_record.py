"""Builds the record of a launch from the state of its panel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nblaunch.launch.views import LaunchInfo
from nblaunch.notebook.charts import MAX_POINTS, Point, downsampled, mean_of
from nblaunch.notebook.panel_state import PanelState, Series
from nblaunch.notebook.record import RankOutputs, RankTail, Record


def record_of(
    state: PanelState,
    info: LaunchInfo | None,
    seconds: float,
    ended_at: float = 0.0,
    tails: Sequence[RankTail] = (),
    outputs: Sequence[RankOutputs] = (),
) -> Record:
    """Return the record of a launch.

    Args:
        state: What the panel shows.
        info: What is known of the launch; None before its first attempt.
        seconds: How long it has run so far.
        ended_at: Seconds since the epoch. Default: it still runs.
        tails: The ends of the logs.
        outputs: What ranks have displayed.
    """
    return Record(
        name=info.name if info else "the launch",
        state=state.state.name if ended_at else "running",
        seconds=state.state.seconds or seconds,
        message=state.state.message,
        ranks=info.ranks_in_words if info else "0 ranks",
        device=info.device if info else "",
        ended_at=ended_at,
        metrics={name: _thinned(ranks, numbered=name in state.plan.numbered) for name, ranks in state.series.items()},
        charts=[chart.names for chart in state.plan.charts],
        numbered=state.plan.numbered,
        best={name: (entry.x, math.nan if entry.y is None else entry.y) for name, (_, entry) in state.best.items()},
        tails=tails,
        notes=[note.text for note in state.notes],
        failure=state.failure,
        log_dir=str(info.log_dir) if info else "",
        launch_id=info.launch_id if info else "",
        outputs=outputs,
    )


def _thinned(ranks: Mapping[int, Series], *, numbered: bool) -> dict[int, list[Point]]:
    """Return at most `MAX_POINTS` points of each rank. All ranks keep the same x, so that their mean is exact."""
    all_points = {rank: series.points(numbered=numbered) for rank, series in ranks.items()}
    if max(map(len, all_points.values())) <= MAX_POINTS:
        return all_points
    kept = {x for x, _ in downsampled(mean_of(all_points), MAX_POINTS - 1)}
    thinned = {
        rank: [point for point in points[:-1] if point[0] in kept] + points[-1:] for rank, points in all_points.items()
    }
    # Ranks that share no x have no mean.
    return {
        rank: points if 1 < len(points) <= MAX_POINTS else downsampled(all_points[rank])
        for rank, points in thinned.items()
    }
