"""The names of the views package in one module, for modules that still import them from here."""

from __future__ import annotations

from nblaunch.launch.views.base import NullView, View
from nblaunch.launch.views.base import ShieldedView as Shielded
from nblaunch.launch.views.events import (
    Controls,
    Failure,
    LaunchInfo,
    LogPiece,
    Outcome,
    RankState,
    RankStatus,
    State,
    Stream,
)

__all__ = [
    "Controls",
    "Failure",
    "LaunchInfo",
    "LogPiece",
    "NullView",
    "Outcome",
    "RankState",
    "RankStatus",
    "Shielded",
    "State",
    "Stream",
    "View",
]
