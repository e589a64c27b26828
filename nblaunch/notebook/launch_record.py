"""Builds the record of a launch from the state of its panel."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nblaunch.launch.views.events import LaunchInfo
from nblaunch.notebook.downsampling import downsampled
from nblaunch.notebook.panel_state import PanelState
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
        world_size=info.world_size if info else 0,
        device=info.device if info else "",
        ended_at=ended_at,
        metrics={
            name: {rank: downsampled(series.points) for rank, series in ranks.items()}
            for name, ranks in state.series.items()
        },
        charts=[chart.names for chart in state.plan.charts],
        best={name: (entry.x, math.nan if entry.y is None else entry.y) for name, (_, entry) in state.best.items()},
        tails=tails,
        notes=[note.text for note in state.notes],
        failure=state.failure,
        log_dir=str(info.log_dir) if info else "",
        launch_id=info.launch_id if info else "",
        outputs=outputs,
        debugging=state.console.for_record,
    )
