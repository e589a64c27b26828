"""What the panel and the record show of a launch, gathered from its events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nblaunch.launch.views import (
    Begun,
    Countdown,
    Displays,
    Ended,
    Event,
    LaunchInfo,
    Logs,
    Note,
    ProfileShown,
    RanksChanged,
    Reports,
    StacksShown,
    Started,
    Stuck,
    View,
)
from nblaunch.notebook.log_feed import LogFeed
from nblaunch.notebook.output_store import OutputStore
from nblaunch.notebook.panel_state import PanelState
from nblaunch.notebook.record import Record, profile_html, record_of

TAIL_LINES = 20


class LaunchModel(View):
    """See the module. For one thread at a time."""

    def __init__(self) -> None:
        self.feed = LogFeed()
        self.outputs = OutputStore()
        self.state = PanelState(0)
        self.info: LaunchInfo | None = None
        self.trace: Path | None = None
        """Of the last profile."""
        self.ended_at = 0.0
        """In seconds since the epoch; 0.0: it runs."""
        self._seconds: Callable[[], float] = lambda: 0.0

    def now(self) -> float:
        """Return the time since the begin, in seconds."""
        return round(self._seconds(), 2)

    def on(self, event: Event) -> None:
        match event:
            case Begun(_, _, seconds):
                self._seconds = seconds
            case Started(info):
                if self.info is None:
                    self.state = PanelState(info.world_size)
                self.info = info
                self.state.start(info)
                for entry in self.outputs.clear():
                    self.state.set_outputs(entry)
            case RanksChanged(ranks):
                self.state.set_ranks(ranks)
            case Logs(logs):
                assert self.info is not None
                for log in logs:
                    self.feed.add(self.info.attempt, log, self.now())
            case Reports(rank, records):
                self.state.add_reports(rank, records)
            case Displays():
                self.state.set_outputs(self.outputs.add(event))
            case Note(text):
                self.state.add_note(self.now(), text)
            case Stuck():
                self.state.set_stuck(self.now(), event)
            case Countdown(text):
                self.state.set_countdown(text)
            case StacksShown(texts):
                self.state.set_stacks(self.now(), texts)
            case ProfileShown(profile):
                self.trace = profile.trace
                self.state.set_profile(self.now(), profile_html(profile), has_trace=profile.trace is not None)
            case Ended(outcome):
                self.state.end(outcome)
                self.ended_at = outcome.at
                total = self._seconds()
                self._seconds = lambda: total  # drop the launch: it holds the result

    def record(self) -> Record:
        tails, outputs = self.feed.tails(TAIL_LINES), self.outputs.for_record()
        return record_of(self.state, self.info, self.now(), self.ended_at, tails, outputs)
