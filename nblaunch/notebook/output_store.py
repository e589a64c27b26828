"""What the ranks of a launch display, on its way to the page and into the record. Bodies stay where ranks put them.

The page learns by `OutputsEntry` which outputs each rank shows, and gets each output once, as JSON in parts.
"""

from __future__ import annotations

import base64
import json
import threading
from collections import deque
from dataclasses import dataclass, field, replace

from nblaunch.launch.views import Displays, Output
from nblaunch.notebook.page_messages import OutputContent, OutputPart, OutputsEntry, to_content
from nblaunch.notebook.record import RankOutputs
from nblaunch.notebook.safe_html import safe_html
from nblaunch.wire.display_records import BITMAPS

MAX_PAGE_BYTES = 32 << 20
"""Of all outputs of a launch at a time; the others are left out, and counted."""
MAX_RECORD_BYTES = 600 << 10
"""Of all outputs in the record."""
_MAX_RECORD_OUTPUTS = 100


@dataclass(slots=True)
class _Item:
    """An output, and its number: each version of an output has its own."""

    number: int
    output: Output


@dataclass(slots=True)
class _RankItems:
    """What one rank shows."""

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
        """Outputs that the page does not have yet."""
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
        """True if the page lacks outputs."""
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
        """Return the outputs for the record: in turns, the next one of each rank, as long as there is room."""
        with self._lock:
            queues = {rank: deque(self._ranks[rank].items.values()) for rank in sorted(self._ranks)}
            left_out = {rank: self._ranks[rank].all_left_out for rank in queues}
        chosen: dict[int, list[OutputContent]] = {rank: [] for rank in queues}
        room, count = MAX_RECORD_BYTES, _MAX_RECORD_OUTPUTS
        closed: set[int] = set()
        while count > 0 and (turn := [rank for rank in queues if queues[rank] and rank not in closed]):
            for rank in turn:
                output = queues[rank][0].output
                content = content_of(output) if output.size < room and count > 0 else None
                size = len(content.body) + len(content.text) if content is not None else 0
                if content is None or size > room:
                    closed.add(rank)
                    continue
                queues[rank].popleft()
                chosen[rank].append(content)
                room, count = room - size, count - 1
        return [
            RankOutputs(rank, tuple(contents), len(queues[rank]) + left_out[rank])
            for rank, contents in chosen.items()
            if contents or queues[rank] or left_out[rank]
        ]


def content_of(output: Output) -> OutputContent:
    """Return an output as the page and the record show it: safe HTML, an image as base64, or text."""
    text = OutputContent("text", output.text, "", None, None)
    body = _body(output)
    if body is None:
        return text
    if output.mime == "text/html":
        html = safe_html(body.decode(errors="replace"))
        return replace(text, kind="html", body=html, text=output.text) if html else text
    if output.mime in BITMAPS or output.mime == "image/svg+xml":
        source = f"data:{output.mime};base64,{base64.b64encode(body).decode()}"
        return OutputContent("image", source, output.text, output.width, output.height)
    return replace(text, body=body.decode(errors="replace"))


def _body(output: Output) -> bytes | None:
    return output.body.encode(errors="replace") if isinstance(output.body, str) else output.body.read()
