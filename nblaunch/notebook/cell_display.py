"""One updatable display under a cell: what waits for nodes, a panel, or a session."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import Any

from ipykernel.zmqshell import ZMQDisplayPublisher

from nblaunch.engines.protocol import Sampler, Workers
from nblaunch.launch.session_state import RankHolding, SessionState, restart_command
from nblaunch.machine import timeouts
from nblaunch.machine.segments import in_words
from nblaunch.machine.server_cells import runs_on_server
from nblaunch.machine.usage import Usage

_log = logging.getLogger(__name__)


class CellDisplay:
    """A display under the cell that constructs it, from any thread, also while later cells run."""

    def __init__(self, shell: Any) -> None:
        self._publisher = shell.display_pub
        self._kernel = shell.kernel
        self._parent = shell.kernel.get_parent()
        self.context = contextvars.copy_context()
        """What runs in a copy of it sends messages that belong to the cell."""
        self._id = uuid.uuid4().hex
        self.shown = False
        self.is_append_only = runs_on_server(shell.kernel)
        """Nothing that the cell shows can be replaced, and nothing can be added after its end."""
        self._kinds: set[str] = set()
        """MIME types and widgets that an append-only cell has been sent."""

    def show(self, bundle: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        """Show this bundle, with the metadata of its parts, in place of the previous one.

        An append-only cell shows it below the previous one, and only if it has a new MIME type or widget. There, the
        panel's script alone keeps the record current: see ``static/record.js``.
        """
        if self.is_append_only:
            kinds = {f"{mime} {value}" if isinstance(value, dict) else mime for mime, value in bundle.items()}
            if kinds <= self._kinds:
                return
            self._kinds |= kinds
            self.shown = False
        content = {"data": dict(bundle), "metadata": dict(metadata or {}), "transient": {"display_id": self._id}}
        kind = "update_display_data" if self.shown else "display_data"
        if not self.shown:
            for stream in (sys.stdout, sys.stderr):  # what the cell has printed before stays above
                with contextlib.suppress(Exception):  # the user may have replaced or closed it
                    stream.flush()
        self.shown = True
        publisher = self._publisher
        assert isinstance(publisher, ZMQDisplayPublisher)
        assert publisher.session is not None
        publisher.session.send(publisher.pub_socket, kind, content, parent=self._parent, ident=publisher.topic)

    def forget(self) -> None:
        """Let an append-only cell show the next bundle whatever it has shown."""
        self._kinds.clear()

    @property
    def cell(self) -> str:
        """The id of the cell, as JupyterLab says it; else empty."""
        return str(self._parent.get("metadata", {}).get("cellId", ""))

    @property
    def is_in_its_cell(self) -> bool:
        """True while the kernel runs the cell that has constructed it."""
        header = self._kernel.get_parent().get("header", {})
        return bool(header.get("msg_id") == self._parent.get("header", {}).get("msg_id"))


WIDGET = "application/vnd.jupyter.widget-view+json"


class WaitingDisplay:
    """A line of text and a button that cancels, while nodes are awaited. The same display shows the panel later."""

    def __init__(self, display: CellDisplay) -> None:
        self._display = display
        self._box: Any = None

    def show(self, text: str, cancel: Callable[[], None] | None) -> None:
        if self._box is None and cancel is not None and text:
            self._open(cancel)
        bundle: dict[str, Any] = {"text/plain": text}
        if self._box is not None and text:
            self._box.children[1].value = text
            bundle[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        self._display.show(bundle)
        if not text:
            self._close()

    def _open(self, cancel: Callable[[], None]) -> None:
        import ipywidgets  # slow, and nodes that are there need no wait

        line = ipywidgets.Label()
        button = ipywidgets.Button(description="Cancel", tooltip="Wait no longer, and free what was reserved")

        def click(clicked: Any) -> None:
            button.disabled, line.value = True, "cancelling …"
            cancel()

        button.on_click(click)
        button.is_prompt = True  # a click may be handled at any time: see `nblaunch.notebook.shell_channel`
        answer_in_main_shell(button)
        self._box = ipywidgets.HBox([button, line])

    def _close(self) -> None:
        if self._box is not None:
            for widget in (*self._box.children, self._box):
                for each in (widget.layout, getattr(widget, "style", None), widget):
                    if each is not None:
                        each.close()
            self._box = None


def answer_in_main_shell(widget: Any) -> None:
    """Let messages of the page to a widget not follow what the kernel has sent on its comm last.

    ipykernel 7.4 sends replies to the subshell that sent on the comm last: that of the busy cell.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, default: default


class UsageMeter:
    """Measures the ranks of a launch or a session, also after a restart has replaced their group. For one thread."""

    def __init__(self, device: str, env: Mapping[str, str]) -> None:
        self._device, self._env = device, env
        self._workers: Workers | None = None
        self._sampler: Sampler | None = None

    def sample(self, workers: Workers | None, ranks: Collection[int]) -> list[Usage]:
        if workers is not self._workers:
            self.close()
            self._workers = workers
            self._sampler = None if workers is None else workers.sampler(self._device, self._env)
        return [] if self._sampler is None else self._sampler.sample(ranks)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._workers = self._sampler = None


# ------------------------------------------------------------------ sessions
_MAX_QUEUED = 8
_MAX_RANKS = 64
_CELL = "text-align:left;padding:1px 16px 1px 0;border:none"
_SAMPLE_INTERVAL_S = 5.0
"""Between two measurements of the memory that a session holds."""


class SessionDisplay:
    """Shows a session under a cell: what runs, what waits, and what each rank holds, in HTML without a widget.

    `state` and `workers` return the present ones. A saved notebook keeps the last state.
    """

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
        html = session_html(state, self._usages, self._gone)
        if html != self._shown:
            self._shown = html
            self._display.show({"text/plain": state.text(), "text/html": html})


def session_html(state: SessionState, usages: Mapping[int, Usage], gone: Collection[int] = ()) -> str:
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
