"""The display of a session under the cell that has started it: what runs, what waits, and what each rank holds.

Plain HTML without a widget, which is replaced when something changes: a saved notebook keeps the last state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import Any

from nblaunch.engines.protocol import Workers
from nblaunch.launch.session_state import RankHolding, SessionState, restart_command
from nblaunch.machine import timeouts
from nblaunch.machine.segments import in_words
from nblaunch.machine.usage import Usage
from nblaunch.notebook.cell_display import CellDisplay, UsageMeter

_log = logging.getLogger(__name__)
_MAX_QUEUED = 8
_MAX_RANKS = 64
_CELL = "text-align:left;padding:1px 16px 1px 0;border:none"
_SAMPLE_INTERVAL_S = 5.0
"""Between two measurements of the memory that a session holds."""


class SessionDisplay:
    """Shows a session under a cell. `state` and `workers` return the present ones."""

    def __init__(
        self,
        shell: Any,
        state: Callable[[], SessionState],
        env: Mapping[str, str],
        workers: Callable[[], Workers],
    ) -> None:
        self._display = CellDisplay(shell)
        self._state, self._env, self._workers = state, env, workers
        self._usages: dict[int, Usage] = {}
        self._gone: set[int] = set()
        """Pids of ranks that have died since the last task."""
        self._shown = ""

    def start(self) -> None:
        self._show(self._state())
        threading.Thread(target=self._follow, name="nblaunch-session-display", daemon=True).start()

    def _follow(self) -> None:
        state = self._state()
        meter = UsageMeter(state.device, self._env)
        sampled_at = 0.0
        try:
            while state.is_open:
                if time.monotonic() - sampled_at > _SAMPLE_INTERVAL_S:
                    sampled_at = time.monotonic()
                    self._sample(meter, state)
                self._show(state)
                time.sleep(timeouts.SESSION_POLL_S)
                state = self._state()
            self._show(state)
        except Exception:  # noqa: BLE001  # the page is gone, or psutil fails; the session goes on
            _log.exception("the display of session %s stopped", state.name)
        finally:
            meter.close()

    def _sample(self, meter: UsageMeter, state: SessionState) -> None:
        alive = [each.rank for each in state.ranks if each.pid]
        self._usages = {usage.rank: usage for usage in meter.sample(self._workers(), alive)}
        self._gone = {each.pid for each in state.ranks if each.rank not in self._usages}

    def _show(self, state: SessionState) -> None:
        html = as_html(state, self._usages, self._gone)
        if html != self._shown:
            self._shown = html
            self._display.show({"text/plain": state.text(), "text/html": html})


def as_html(state: SessionState, usages: Mapping[int, Usage], gone: Collection[int] = ()) -> str:
    """Return the display of a session. Gone: pids of ranks that have died since the last task."""
    since = time.strftime("%H:%M", time.localtime(time.time() - state.idle))  # a saved notebook shows it for long
    doing = "stopped" if not state.is_open else f"runs {state.running}" if state.running else f"idle since {since}"
    queued = [*state.queued[:_MAX_QUEUED], *(["…"] if len(state.queued) > _MAX_QUEUED else [])]
    lines = [f"<div>queued: {escape(each)}</div>" for each in queued]
    head = (
        f"<div><b>session {escape(state.name)}</b> · {state.size} on {escape(state.device)} · "
        f"<b>{escape(doing)}</b></div>"
    )
    table = _table(state, usages, gone) if state.is_open else ""
    if state.is_open and (dead := [each.rank for each in state.ranks if _is_dead(each, gone)]):
        restart = restart_command(state.name, dead if len(dead) < len(state.ranks) else ())
        table += f"<div>{escape(restart)} restarts {'it' if len(dead) == 1 else 'them'}</div>"
    style = "border:1px solid rgba(128,128,128,0.35);border-radius:6px;padding:6px 14px;margin:2px 0;line-height:1.5"
    return f'<div class="tex2jax_ignore mathjax_ignore" style="{style}">{head}{"".join(lines)}{table}</div>'


def _table(state: SessionState, usages: Mapping[int, Usage], gone: Collection[int]) -> str:
    has_gpu = any(usage.gpu_memory is not None for usage in usages.values())
    rows = [_row(["", "state", "names", "memory", *(["GPU memory"] if has_gpu else [])])]
    for each in state.ranks[:_MAX_RANKS]:
        usage = usages.get(each.rank)
        doing = "dead" if _is_dead(each, gone) else "busy" if state.running else "idle"
        memory = "" if usage is None else _about(usage.memory)
        gpu = [] if not has_gpu else ["" if usage is None or not usage.gpu_memory else _about(usage.gpu_memory)]
        pid = f", pid {each.pid}" if doing != "dead" else ""
        rows.append(_row([f"rank {each.rank}", doing + pid, f"{each.names}", memory, *gpu]))
    more = len(state.ranks) - _MAX_RANKS
    if more > 0:
        rows.append(_row([f"and {more} more"]))
    return f'<table style="margin:4px 0;border:none;font-size:13px">{"".join(rows)}</table>'


def _about(size: int) -> str:
    """Format bytes by two digits: each change of the display makes JupyterLab call the notebook unsaved."""
    return in_words(float(f"{size:.1e}"))


def _is_dead(rank: RankHolding, gone: Collection[int]) -> bool:
    return not rank.pid or rank.pid in gone


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td style={chr(34)}{_CELL}{chr(34)}>{escape(cell)}</td>' for cell in cells)}</tr>"
