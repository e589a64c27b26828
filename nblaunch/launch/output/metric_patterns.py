r"""Metrics of code that only prints: read out of the lines of its log, by patterns such as ``loss: (?P<loss>[\d.]+)``.

Runs in a launch's supervisor thread. Python's ``re`` cannot be interrupted and lets no other thread run while it
searches, so what a slow pattern can cost is bounded by the length of the lines that it sees; one that takes
exponential time, such as ``(?P<x>\d+)+y``, is the writer's own affair.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nblaunch.engines.protocol import Log
from nblaunch.errors import ArgumentError
from nblaunch.launch.output.log_files import Tail
from nblaunch.launch.output.terminal_lines import LineAssembler, without_colours

STEP = "step"
"""The group that holds no metric, but where training stands."""
_MOST_PATTERNS = 100
_HINT = r"as in (?P<loss>[\d.]+)"
_LONGEST = 1 << 13
"""Bytes of a line that are searched: ``[\\d.]+ loss`` takes 0.4 s for so many digits, and 30 s for 64 KB of them."""
_BLOCK = 1 << 16
_BLOCKS = 8
"""Read of one log at one look: 1 MB for both of a rank."""
_SPECIAL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
_SPECIAL_TEXT = re.compile(_SPECIAL.pattern.decode("latin-1"))
_COMMAS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?![\d,])")
_NUMBER = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d{1,18}")


def compile_patterns(value: Any) -> tuple[re.Pattern[str], ...]:
    """The patterns of ``metric_patterns=value``: None, a string, a compiled pattern, or a sequence of the two.

    Raises:
        ArgumentError: One of them can find no metric; the message names it.
    """
    if value is None:
        return ()
    given = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)) else [value]
    if len(given) > _MOST_PATTERNS:
        raise ArgumentError(f"metric_patterns=<{len(given)} patterns>: at most {_MOST_PATTERNS}")
    return tuple(map(_compiled, given))


def _compiled(given: Any) -> re.Pattern[str]:
    text = given.pattern if isinstance(given, re.Pattern) else given
    if isinstance(text, (bytes, bytearray)):
        raise ArgumentError(f"metric_patterns={text!r}: must be text, not bytes")
    if not isinstance(text, str):
        raise ArgumentError(f"metric_patterns={text!r}: must be a string, a compiled pattern, or a list of them")
    try:
        pattern = re.compile(given)
    except (re.error, OverflowError, RecursionError) as error:
        raise ArgumentError(f"metric_patterns={text!r}: not a regular expression: {error}") from None
    if not pattern.groupindex:
        raise ArgumentError(f"metric_patterns={text!r}: name the group that holds the number, {_HINT}")
    if set(pattern.groupindex) == {STEP}:
        raise ArgumentError(f"metric_patterns={text!r}: has a step, but no metric: name one more group, {_HINT}")
    return pattern


# ------------------------------------------------------------------ one line
def search(line: str, patterns: Sequence[re.Pattern[str]]) -> dict[str, Any] | None:
    """The ``step`` and ``metrics`` of a line, or None where it has no metric. What two patterns find, the first has."""
    metrics: dict[str, float] = {}
    step: int | None = None
    for pattern in patterns:
        match = pattern.search(line)
        for name, text in match.groupdict().items() if match else ():
            if text is None:  # this group took no part
                continue
            if name == STEP:
                step = _whole(text) if step is None else step
            elif name not in metrics and (value := _number(text)) is not None:
                metrics[name] = value
    return {"step": step, "metrics": metrics} if metrics else None


def _number(text: str) -> float | None:
    text = _bare(text)
    return float(text) if _NUMBER.fullmatch(text) else None


def _whole(text: str) -> int | None:
    text = _bare(text)
    return int(text) if _WHOLE.fullmatch(text) else None


def _bare(text: str) -> str:
    """A number's text without thousands separators, and without what may follow it: a percent sign, a full stop."""
    text = text.strip().rstrip(".,;:").removesuffix("%").rstrip(" .")
    commas = _COMMAS.match(text)
    return commas[0].replace(",", "") + text[commas.end() :] if commas else text


# ------------------------------------------------------------------ a log
class _Lines:
    """The lines of a stream for searching: as a terminal shows them, without colours, and of a long one the beginning.

    Unlike a `LineAssembler` it looks at a line's characters one by one only where the cursor moves in it.
    """

    def __init__(self) -> None:
        self._start = b""
        """Of the line that has not ended."""
        self._redrawn: LineAssembler | None = None
        """Holds that line instead, where it is long because it is drawn again and again, as tqdm's are."""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        first, *others = data.split(b"\n")
        if not others:
            self._add(first)
            return []
        lines = [self._end(first), *map(_shown, others[:-1])]
        self._add(others[-1])
        return lines

    def finish(self) -> list[str]:
        """The line that never ended, if there is one."""
        return [self._end(b"")]

    def _add(self, part: bytes) -> None:
        if self._redrawn is not None:
            self._redrawn.feed(part)
        elif len(self._start) + len(part) <= _LONGEST:
            self._start += part
        elif b"\r" in self._start or b"\r" in part:
            self._redrawn = LineAssembler()
            self._redrawn.feed(self._start + part)
        else:
            self._start = (self._start + part)[:_LONGEST]

    def _end(self, part: bytes) -> str:
        start, self._start = self._start, b""
        redrawn, self._redrawn = self._redrawn, None
        return without_colours(redrawn.feed(part + b"\n")[0]) if redrawn is not None else _shown(start + part)


def _shown(line: bytes) -> str:
    """A whole line as a terminal shows it."""
    if not _SPECIAL.search(line):
        return line[:_LONGEST].decode(errors="replace")
    text = without_colours(line.removesuffix(b"\r").decode(errors="replace"))
    if _SPECIAL_TEXT.search(text):
        text = without_colours(LineAssembler().feed(line + b"\n")[0])
    return text[:_LONGEST]


class _Log(Tail):
    """A log that is read whole, block by block, however fast it grows."""

    is_behind = False
    """There was more than the last block."""
    last = sys.maxsize
    """Where to end."""

    def block(self) -> bytes:
        """What comes next."""
        start, end = self._appended()
        end = min(end, self.last)
        self._offset = min(end, start + _BLOCK)
        self.is_behind = self._offset < end
        return self._between(start, self._offset)

    def end_here(self) -> None:
        """Leave unread what is appended from now on."""
        start, self.last = self._appended()
        self._offset = start
        self.is_behind = start < self.last


class PrintedMetrics:
    """The metrics that one rank prints. With no patterns it opens no file and does nothing.

    Args:
        patterns: What to search each line for.
        logs: The rank's logs.
    """

    def __init__(self, patterns: Sequence[re.Pattern[str]], *logs: Path | Log) -> None:
        self._patterns = patterns
        self._sources = [(_Log(log), _Lines()) for log in logs] if patterns else []

    @property
    def is_behind(self) -> bool:
        """Whether the last `read` left something for the next."""
        return any(log.is_behind for log, _ in self._sources)

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """Records as `nblaunch.report` spools them, from lines printed since the last call: of about 1 MB at most.

        Args:
            seconds: How long to go on; at least one block of each log is read.
        """
        records: list[dict[str, Any]] = []
        for log, lines in self._sources:
            until = time.monotonic() + seconds / len(self._sources)
            for _ in range(_BLOCKS):
                records += self._found(lines.feed(log.block()))
                if not log.is_behind or time.monotonic() > until:
                    break
        return records

    def end_here(self) -> None:
        """Leave out what is printed from now on: whatever outlives a rank must not be followed for ever."""
        for log, _ in self._sources:
            log.end_here()

    def finish(self) -> list[dict[str, Any]]:
        """Records from the lines that have not ended; the rank has."""
        return [record for _, lines in self._sources for record in self._found(lines.finish())]

    def _found(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        now = time.time()
        found = (search(line, self._patterns) for line in lines)
        return [{"time": now, **record} for record in found if record is not None]

    def close(self) -> None:
        """Close the logs; harmless when they are closed."""
        for log, _ in self._sources:
            log.close()
