"""Sends what a rank displays to the notebook, as MIME bundles. Runs in ranks and their children, without IPython.

An output is a record in the rank's spool, so displaying never waits for the notebook. What exceeds the limits of
`nblaunch.wire.display_records` is left out and counted.
"""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nblaunch.ranks import report
from nblaunch.wire import display_records as limits
from nblaunch.wire.display_records import BITMAPS, SUFFIXES, Cleared, DisplayRecord, LeftOut, Shown
from nblaunch.wire.launch_files import output_file

_numbers = itertools.count(1)


@dataclass(slots=True)
class _Kept:
    display_id: str
    mime: str
    size: int
    is_in_file: bool


class _Outputs:
    def __init__(self) -> None:
        self.kept: dict[str, _Kept] = {}
        self.left_out = 0
        self.spooled = 0
        """Bytes of all records so far."""
        self.clears_next = False
        self._noted = 0
        """The last count of outputs left out that was spooled."""

    def show(self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str) -> None:
        if self.clears_next:
            self.clear()
        if len(self.kept) >= limits.MAX_OUTPUTS:
            self._leave_out()
        else:
            self._write(f"{os.getpid()}-{next(_numbers)}", data, metadata, display_id)

    def update(self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str) -> None:
        for key in [key for key, kept in self.kept.items() if kept.display_id == display_id]:
            self._write(key, data, metadata, display_id)

    def clear(self) -> None:
        self.clears_next = False
        if self.kept or self.left_out:
            for key, kept in self.kept.items():
                _remove(key, kept)
            self.kept.clear()
            self.left_out = self._noted = 0
            self._spool(Cleared())

    def note_left_out(self) -> None:
        if self.left_out != self._noted:
            self._noted = self.left_out
            self._spool(LeftOut(self.left_out))

    def _leave_out(self) -> None:
        self.left_out += 1
        if self.left_out & (self.left_out - 1) == 0:  # 1, 2, 4, 8 ...: a flood spools little
            self.note_left_out()

    def _write(self, key: str, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str) -> None:
        mime, body, text = _best(data)
        before = self.kept.get(key)
        others = sum(kept.size for kept in [*self.kept.values()]) - (before.size if before else 0)
        if self.spooled > limits.MAX_SPOOLED_BYTES or others + len(body) > limits.MAX_KEPT_BYTES:
            self._leave_out()
            return
        is_in_file = mime in BITMAPS or len(body) > limits.MAX_INLINE_BYTES
        if before is not None and (before.mime != mime or before.is_in_file > is_in_file):
            _remove(key, before)
        if is_in_file and not _save(key, mime, body):
            self._leave_out()
            return
        self.kept[key] = _Kept(display_id, mime, len(body), is_in_file)
        size = metadata.get(mime) if isinstance(metadata.get(mime), Mapping) else {}
        self._spool(
            Shown(
                key=key,
                mime=mime,
                text=text,
                body=None if is_in_file else body.decode(errors="replace"),
                size=len(body),
                width=_pixels(size, "width"),
                height=_pixels(size, "height"),
            )
        )

    def _spool(self, record: DisplayRecord) -> None:
        line = limits.to_line(record)
        self.spooled += len(json.dumps(line))
        report.spool(line)


_outputs = _Outputs()


def begin() -> None:
    global _outputs
    _outputs = _Outputs()


def publish(
    data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str = "", *, update: bool = False
) -> None:
    """Show a MIME bundle under the cell, or replace the output with this display id. A no-op outside a launch."""
    if report.current() is not None and data:
        (_outputs.update if update else _outputs.show)(data, metadata, display_id)


def clear(*, wait: bool) -> None:
    if report.current() is not None:
        _outputs.clears_next = wait
        if not wait:
            _outputs.clear()


def finish() -> None:
    """Report the outputs that were left out, at the end of a task."""
    if report.current() is not None:
        _outputs.note_left_out()


def as_png(figure: Any) -> str | None:
    """Return a matplotlib figure as base64 PNG; None if it is empty."""
    if not (figure.axes or figure.lines):
        return None
    if figure.canvas is None:
        from matplotlib.backend_bases import FigureCanvasBase

        FigureCanvasBase(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return base64.b64encode(file.getvalue()).decode()


# ------------------------------------------------------------------ bundles
def _best(data: Mapping[str, Any]) -> tuple[str, bytes, str]:
    """Return the most expressive type that the notebook shows, its body, and the text that stands for it."""
    plain = _plain_text(data)
    text = plain if len(plain) <= limits.MAX_TEXT_CHARS else plain[: limits.MAX_TEXT_CHARS] + "…"
    for mime in SUFFIXES:
        body = _body(mime, plain if mime == "text/plain" else data.get(mime))
        if body and len(body) <= limits.MAX_OUTPUT_BYTES:
            return mime, body, text
    return "text/plain", text.encode(errors="replace"), text


def _plain_text(data: Mapping[str, Any]) -> str:
    if "application/json" in data:
        with suppress(TypeError, ValueError):  # not JSON after all
            return json.dumps(data["application/json"], indent=2, ensure_ascii=False)
    found = data.get("text/plain")
    return found if isinstance(found, str) else f"<{', '.join(map(str, data))}>"


def _body(mime: str, value: Any) -> bytes | None:
    if mime in BITMAPS:
        if isinstance(value, bytes):
            return value
        try:
            return base64.b64decode("".join(value.split()), validate=True)
        except (AttributeError, binascii.Error, ValueError):
            return None
    return value.encode(errors="replace") if isinstance(value, str) else None


def _pixels(metadata: Any, name: str) -> int | None:
    value = metadata.get(name)
    return round(value) if isinstance(value, (int, float)) and 1 <= value < 100_000 else None


# ------------------------------------------------------------------ files
def _save(key: str, mime: str, body: bytes) -> bool:
    """Write a body to its file, replacing it whole. Return False if there is no room."""
    context = report.current()
    assert context is not None
    path = output_file(context.log_dir, context.rank, key, SUFFIXES[mime])
    scratch = path.with_suffix(".part")
    try:
        scratch.write_bytes(body)
        os.replace(scratch, path)
    except OSError:  # a full disk must not fail the training
        with suppress(OSError):
            scratch.unlink()
        return False
    return True


def _remove(key: str, kept: _Kept) -> None:
    context = report.current()
    if kept.is_in_file and context is not None:
        with suppress(OSError):
            output_file(context.log_dir, context.rank, key, SUFFIXES[kept.mime]).unlink()
