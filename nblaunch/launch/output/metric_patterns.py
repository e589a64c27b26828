r"""Metrics extracted from printed lines, by patterns such as ``loss: (?P<loss>[\d.]+)``.

Runs in a launch's supervisor thread. Python's ``re`` holds the GIL and cannot be interrupted, so only the beginning of
a long line is searched. A pattern that takes exponential time, such as ``(?P<x>\d+)+y``, still blocks the kernel.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from nblaunch.engines.protocol import Log
from nblaunch.errors import ArgumentError
from nblaunch.launch.output.tails import Tail
from nblaunch.launch.output.terminal_lines import LineAssembler, without_colours

STEP = "step"
"""The group of the training step, which is no metric."""
_MAX_PATTERNS = 100
_HINT = r"as in (?P<loss>[\d.]+)"
_MAX_LINE_BYTES = 1 << 13
"""Searched of each line: ``[\\d.]+ loss`` takes 0.4 s on 8 KB of digits, and 30 s on 64 KB."""
_BLOCK_BYTES = 1 << 16
_MAX_BLOCKS = 8
"""Per log and call of `PrintedMetrics.read`: 1 MB for the two logs of a rank."""
_SPECIAL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
_SPECIAL_TEXT = re.compile(_SPECIAL.pattern.decode("latin-1"))
_COMMAS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?![\d,])")
_NUMBER = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d{1,18}")


def compile_patterns(value: Any) -> tuple[re.Pattern[str], ...]:
    """Compile ``metric_patterns=value``: None, a string, a compiled pattern, or a sequence of them.

    Raises:
        ArgumentError: A pattern is invalid or has no named group for a metric; the message names it.
    """
    if value is None:
        return ()
    given = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)) else [value]
    if len(given) > _MAX_PATTERNS:
        raise ArgumentError(f"metric_patterns=<{len(given)} patterns>: at most {_MAX_PATTERNS}")
    return tuple(map(_compiled, given))


def _compiled(given: Any) -> re.Pattern[str]:
    text = given.pattern if isinstance(given, re.Pattern) else given
    if isinstance(text, (bytes, bytearray)):
        raise ArgumentError(f"metric_patterns={text!r}: must be str, not bytes")
    if not isinstance(text, str):
        raise ArgumentError(f"metric_patterns={text!r}: must be a string, a compiled pattern, or a list of them")
    try:
        pattern = re.compile(given)
    except (re.error, OverflowError, RecursionError) as error:
        raise ArgumentError(f"metric_patterns={text!r}: not a regular expression: {error}") from None
    if not pattern.groupindex:
        raise ArgumentError(f"metric_patterns={text!r}: name the group that holds the number, {_HINT}")
    if set(pattern.groupindex) == {STEP}:
        raise ArgumentError(f"metric_patterns={text!r}: has a step, but no metric: add a named group, {_HINT}")
    return pattern


# ------------------------------------------------------------------ one line
def search(line: str, patterns: Sequence[re.Pattern[str]]) -> dict[str, Any] | None:
    """Return the ``step`` and ``metrics`` of a line, or None without a metric. For a name, the first pattern wins."""
    metrics: dict[str, float] = {}
    step: int | None = None
    for pattern in patterns:
        match = pattern.search(line)
        for name, text in match.groupdict().items() if match else ():
            if text is None:  # the group did not participate
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
    """Strip thousands separators, a trailing percent sign and trailing punctuation."""
    text = text.strip().rstrip(".,;:").removesuffix("%").rstrip(" .")
    commas = _COMMAS.match(text)
    return commas[0].replace(",", "") + text[commas.end() :] if commas else text


# ------------------------------------------------------------------ a log
class _Lines:
    """Splits a stream into lines to search: as a terminal shows them, without colours, cut to `_MAX_LINE_BYTES`.

    Faster than a `LineAssembler`, which it uses only for lines in which the cursor moves.
    """

    def __init__(self) -> None:
        self._start = b""
        """The unfinished line."""
        self._redrawn: LineAssembler | None = None
        """Holds the unfinished line instead if it is long because it is redrawn, as progress bars are."""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        first, *others = data.split(b"\n")
        if not others:
            self._add(first)
            return []
        lines = [self._end(first), *map(_shown, others[:-1])]
        self._add(others[-1])
        return lines

    def finish(self) -> list[str]:
        """Return the unfinished line."""
        return [self._end(b"")]

    def _add(self, part: bytes) -> None:
        if self._redrawn is not None:
            self._redrawn.feed(part)
        elif len(self._start) + len(part) <= _MAX_LINE_BYTES:
            self._start += part
        elif b"\r" in self._start or b"\r" in part:
            self._redrawn = LineAssembler()
            self._redrawn.feed(self._start + part)
        else:
            self._start = (self._start + part)[:_MAX_LINE_BYTES]

    def _end(self, part: bytes) -> str:
        start, self._start = self._start, b""
        redrawn, self._redrawn = self._redrawn, None
        return without_colours(redrawn.feed(part + b"\n")[0]) if redrawn is not None else _shown(start + part)


def _shown(line: bytes) -> str:
    """Return a complete line as a terminal shows it."""
    if not _SPECIAL.search(line):
        return line[:_MAX_LINE_BYTES].decode(errors="replace")
    text = without_colours(line.removesuffix(b"\r").decode(errors="replace"))
    if _SPECIAL_TEXT.search(text):
        text = without_colours(LineAssembler().feed(line + b"\n")[0])
    return text[:_MAX_LINE_BYTES]


class _Log(Tail):
    """A log that is read completely, block by block, however fast it grows."""

    is_behind = False
    """True if the last block was not the end."""
    last = sys.maxsize
    """The offset to stop at."""

    def block(self) -> bytes:
        """Return the next block."""
        start, end = self._appended()
        end = min(end, self.last)
        self._offset = min(end, start + _BLOCK_BYTES)
        self.is_behind = self._offset < end
        return self._between(start, self._offset)

    def end_here(self) -> None:
        """Ignore what is appended after this call."""
        start, self.last = self._appended()
        self._offset = start
        self.is_behind = start < self.last


class PrintedMetrics:
    """The metrics that one rank prints. Without patterns no file is opened.

    Args:
        patterns: Each line is searched for these.
        logs: The rank's logs.
    """

    def __init__(self, patterns: Sequence[re.Pattern[str]], *logs: Log) -> None:
        self._patterns = patterns
        self._sources = [(_Log(log), _Lines()) for log in logs] if patterns else []
        self.lines = self.matches = 0
        """How many lines that are not empty were searched, and how many had a metric."""

    @property
    def is_behind(self) -> bool:
        """True if the last `read` did not reach the end of the logs."""
        return any(log.is_behind for log, _ in self._sources)

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """Search at most 1 MB of new lines, and return records in the format of `nblaunch.report`.

        Args:
            seconds: Stop after this time, but read at least one block of each log.
        """
        records: list[dict[str, Any]] = []
        for log, lines in self._sources:
            until = time.monotonic() + seconds / len(self._sources)
            for _ in range(_MAX_BLOCKS):
                records += self._found(lines.feed(log.block()))
                if not log.is_behind or time.monotonic() > until:
                    break
        return records

    def end_here(self) -> None:
        """Ignore what is printed after this call: a child process may outlive its rank and keep printing."""
        for log, _ in self._sources:
            log.end_here()

    def finish(self) -> list[dict[str, Any]]:
        """Return the records of unfinished lines. Call it after the rank has exited."""
        return [record for _, lines in self._sources for record in self._found(lines.finish())]

    def _found(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        now = time.time()
        found = [record for line in lines if (record := search(line, self._patterns)) is not None]
        self.lines += sum(map(bool, lines))
        self.matches += len(found)
        return [{"time": now, **record} for record in found]

    def close(self) -> None:
        """Close the logs. Idempotent."""
        for log, _ in self._sources:
            log.close()
