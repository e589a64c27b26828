"""What the ranks of a launch display, on its way to the page and into the record. Bodies stay where ranks put them.

The page learns by `OutputsEntry` which outputs each rank shows, and gets each output once, as JSON in parts.
"""

from __future__ import annotations

import base64
import json
import threading
from collections import deque
from dataclasses import dataclass, field, replace

from nblaunch.launch.output.terminal_lines import fair_shares
from nblaunch.launch.views import Displays, Output
from nblaunch.notebook.page_messages import OutputContent, OutputPart, OutputsEntry, to_content
from nblaunch.notebook.record import RankOutputs
from nblaunch.notebook.safe_html import safe_html
from nblaunch.wire.display_records import BITMAPS

MAX_PAGE_BYTES = 32 << 20
"""Of all outputs of a launch at a time; the others are left out, and counted."""
MAX_RECORD_BYTES = 450 << 10
"""Of all outputs in the record, before images become base64."""
_MAX_RECORD_OUTPUTS = 100


@dataclass(slots=True)
class _Item:
    """An output, and its number: each version of an output has its own."""

    number: int
    output: Output


@dataclass(slots=True)
class _RankItems:
    items: dict[str, _Item] = field(default_factory=dict)
    """By key, in order of display."""
    left_out: int = 0
    """By the rank's limits."""
    refused: set[str] = field(default_factory=set)
    """Keys that the limit of the page leaves out."""

    @property
    def all_left_out(self) -> int:
        return self.left_out + len(self.refused)


class OutputStore:
    """The outputs of a launch. Thread-safe; one thread takes parts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Not held while a body is read."""
        self._ranks: dict[int, _RankItems] = {}
        self._size = 0
        self._count = 0
        self._waiting: deque[tuple[int, _Item]] = deque()
        self._sending: tuple[int, bytes, int] | None = None
        """The number and the bytes of the output being sent, and how many were sent."""

    # ------------------------------------------------------------------ from ranks
    def clear(self) -> list[OutputsEntry]:
        """Remove all outputs: another attempt begins. Return the entries of ranks that had some."""
        with self._lock:
            ranks = list(self._ranks)
            self._ranks.clear()
            self._waiting.clear()
            self._size = 0
        return [OutputsEntry(rank, [], 0) for rank in ranks]

    def add(self, displays: Displays) -> OutputsEntry:
        """Take what a rank displays; return what it shows now."""
        with self._lock:
            rank = self._ranks.setdefault(displays.rank, _RankItems())
            if displays.is_cleared:
                self._size -= sum(item.output.size for item in rank.items.values())
                self._ranks[displays.rank] = rank = _RankItems()
            if displays.left_out is not None:
                rank.left_out = displays.left_out
            for output in displays.outputs:
                self._add(displays.rank, rank, output)
            numbers = [item.number for item in rank.items.values()]
            return OutputsEntry(displays.rank, numbers, rank.all_left_out)

    def _add(self, number: int, rank: _RankItems, output: Output) -> None:
        before = rank.items.get(output.key)
        grown = self._size + output.size - (before.output.size if before else 0)
        if grown > MAX_PAGE_BYTES:
            rank.refused.add(output.key)
            return
        rank.refused.discard(output.key)
        self._size, self._count = grown, self._count + 1
        rank.items[output.key] = item = _Item(self._count, output)
        self._waiting.append((number, item))

    # ------------------------------------------------------------------ to the page
    @property
    def has_more(self) -> bool:
        with self._lock:
            return self._sending is not None or bool(self._waiting)

    def rewind(self) -> None:
        """Send everything again: a page has missed messages."""
        with self._lock:
            self._sending = None
            found = ((number, item) for number, rank in self._ranks.items() for item in rank.items.values())
            self._waiting = deque(found)

    def take(self, most: int) -> tuple[list[OutputPart], bytes]:
        """Return the next parts, at most `most` bytes of them, and their bytes."""
        parts: list[OutputPart] = []
        taken = b""
        while len(taken) < most and (sending := self._next()) is not None:
            number, data, start = sending
            piece = data[start : start + most - len(taken)]
            parts.append(OutputPart(number, start, len(piece), len(data)))
            taken += piece
            end = start + len(piece)
            with self._lock:
                self._sending = (number, data, end) if end < len(data) else None
        return parts, taken

    def _next(self) -> tuple[int, bytes, int] | None:
        """Return the output to send, and how much of it was sent; None if the page has all."""
        while True:
            with self._lock:
                if self._sending is not None:
                    return self._sending
                if not self._waiting:
                    return None
                rank, item = self._waiting.popleft()
                shown = self._ranks.get(rank)
            if shown is not None and shown.items.get(item.output.key) is item:  # neither removed nor replaced
                return item.number, json.dumps(to_content(content_of(item.output))).encode(), 0

    # ------------------------------------------------------------------ into the record
    @property
    def fits_record(self) -> bool:
        """True if the record shows everything that the panel would."""
        with self._lock:
            outputs = sum(len(rank.items) for rank in self._ranks.values())
        return self._size <= MAX_RECORD_BYTES // 2 and outputs <= _MAX_RECORD_OUTPUTS

    def for_record(self) -> list[RankOutputs]:
        """Return the outputs for the record: of each rank the first ones, as far as they fit its share."""
        with self._lock:
            shown = {rank: [item.output for item in self._ranks[rank].items.values()] for rank in sorted(self._ranks)}
            left_out = {rank: self._ranks[rank].all_left_out for rank in shown}
        size = {rank: sum(output.size for output in outputs) for rank, outputs in shown.items()}
        bytes_of = dict(zip(shown, fair_shares([*size.values()], MAX_RECORD_BYTES), strict=True))
        count_of = dict(zip(shown, fair_shares([*map(len, shown.values())], _MAX_RECORD_OUTPUTS), strict=True))
        found = []
        for rank, outputs in shown.items():
            contents: list[OutputContent] = []
            room = bytes_of[rank]
            for output in outputs[: count_of[rank]]:
                room -= output.size
                if room < 0:
                    break
                contents.append(content_of(output))
            if outputs or left_out[rank]:
                found.append(RankOutputs(rank, tuple(contents), len(outputs) - len(contents) + left_out[rank]))
        return found


def content_of(output: Output) -> OutputContent:
    """Return an output as the page and the record show it: safe HTML, an image as base64, or text."""
    text = OutputContent("text", output.text, "", None, None)
    try:
        body = output.body.encode(errors="replace") if isinstance(output.body, str) else output.body.read_bytes()
    except OSError:  # pruned, or replaced meanwhile
        return text
    if output.mime == "text/html":
        html = safe_html(body.decode(errors="replace"))
        return replace(text, kind="html", body=html, text=output.text) if html else text
    if output.mime in BITMAPS or output.mime == "image/svg+xml":
        source = f"data:{output.mime};base64,{base64.b64encode(body).decode()}"
        return OutputContent("image", source, output.text, output.width, output.height)
    return replace(text, body=body.decode(errors="replace"))
