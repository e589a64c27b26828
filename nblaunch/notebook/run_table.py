"""What ran: the table of all runs and launches, and the record of one, from their folders."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from typing import Any

from nblaunch.launch import run_folders
from nblaunch.launch.attached import Replay
from nblaunch.launch.frontend import host
from nblaunch.launch.output.log_directory import state_root
from nblaunch.launch.output.metric_names import number_of
from nblaunch.launch.run_folders import RunFolder
from nblaunch.launch.views import Begun, duration_text
from nblaunch.machine.segments import in_words
from nblaunch.notebook.launch_model import LaunchModel
from nblaunch.notebook.record import as_html, as_text

_MAX_ROWS = 20
_MAX_METRICS = 4
_COLUMNS = ("name", "function", "state", "ranks", "since", "duration", "metrics", "notebook", "folder")


class Runs(list[RunFolder]):
    """Runs and launches, the latest first: their names, states, metrics and folders. Displays as a table."""

    def __repr__(self) -> str:
        rows = [_COLUMNS, *map(_cells, self._shown())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *self._more()]) if self else f"no runs or launches in {state_root()} yet"

    def _repr_html_(self) -> str:
        if not self:
            return repr(self)
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in _COLUMNS)
        body = "".join(f"<tr>{''.join(map(_cell_html, _cells(run)))}</tr>" for run in self._shown())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" + "<br>".join(self._more())

    def _shown(self) -> list[RunFolder]:
        runs = [run for run in self if run.is_detached][:_MAX_ROWS]  # launches of a day hide no run
        launches = [run for run in self if not run.is_detached][:_MAX_ROWS]
        return sorted([*runs, *launches], key=lambda run: -run.began)

    def _more(self) -> list[str]:
        kept = [run for run in self if run.is_detached]
        size = in_words(sum(run_folders.size_of(run.path) for run in kept))
        more = len(self) - len(self._shown())
        said = [f"and {more} more"] if more else []
        noun, them = ("run takes", "it") if len(kept) == 1 else ("runs take", "them")
        taken = f"{len(kept)} detached {noun} {size} until you remove {them}: python -m nblaunch rm NAME"
        said += [taken] if kept else []
        return [*said, f"folders: in {self[0].path.parent}"] if self else said


def _cell_html(text: str) -> str:
    return f"<td style='text-align:left;white-space:nowrap'>{escape(text)}</td>"


def _cells(run: RunFolder) -> tuple[str, ...]:
    metrics = [f"{name} {number_of(name, value)}" for name, value in list(run.metrics.items())[:_MAX_METRICS]]
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began))
    duration = duration_text(run.seconds) if run.seconds else ""
    named = run.name, run.function, run.state, str(run.ranks or "")
    return *named, since, duration, ", ".join(metrics), Path(run.notebook).name, run.path.name


def runs() -> Runs:
    """Return a table of your launches and detached runs on this machine, the latest first.

    It shows the last 20 of each, and holds all of them: ``[each.name for each in nblaunch.runs()]``.
    Launches are listed as long as their logs are kept: the last 50, and as many cells of sessions. A detached run is
    listed until ``python -m nblaunch rm NAME`` removes it.
    """
    return Runs(run_folders.every())


def show(name: str | None = None) -> None:
    """Show the record of a launch or run in this cell: its state, its charts, and what it displayed and printed last.

    Args:
        name: The name of a run, the id of a launch, or the name of a function, for its latest launch. `nblaunch.runs`
            lists them. Default: the latest launch or run.

    Raises:
        ArgumentError: There is no such launch or run.
    """
    run = run_folders.find(name)
    html = record_of(run)
    if run.is_over and run.is_detached:
        run_folders.mark_seen(run.path)
    host().show_html(html, as_text(html))


def record_of(run: RunFolder) -> str:
    """Return the record of a launch or run as HTML, from its folder."""
    model = LaunchModel()
    replay = Replay(run, model)
    unheard: Any = None
    model.on(Begun(unheard, False, replay.seconds))
    replay.read()
    if run.state == "lost":
        replay.end(run.lost)
    return as_html(model.record())
