r"""Metrics extracted from printed lines, by patterns such as ``loss: (?P<loss>[\d.]+)``.

Runs in a launch's supervisor thread, on the lines that the follower of the logs reads. Python's ``re`` holds the GIL
and cannot be interrupted: a pattern that takes exponential time, such as ``(?P<x>\d+)+y``, blocks the kernel.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from nblaunch.errors import ArgumentError
from nblaunch.launch.output.tails import Piece
from nblaunch.launch.output.terminal_lines import LineAssembler, without_colours

STEP = "step"
"""The group of the training step, which is no metric."""
_MAX_PATTERNS = 100
_HINT = r"as in (?P<loss>[\d.]+)"
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


class PrintedMetrics:
    """Searches the lines of one log: as a terminal shows them, without the middle of long ones.

    Attributes:
        lines: How many lines that are not empty were searched.
        matches: How many of them had a metric.
    """

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = patterns
        self._assembler = LineAssembler()
        self.lines = self.matches = 0

    def search(self, piece: Piece) -> list[dict[str, Any]]:
        """Return records in the format of `nblaunch.report`, of the lines that a piece of the log completes."""
        lines = self._assembler.feed(piece.head)
        if piece.skipped_bytes:
            lines += [*self._assembler.finish(), *self._assembler.feed(piece.tail)]
        return self._found(lines)

    def finish(self) -> list[dict[str, Any]]:
        """Return the record of the unfinished line. Call it after the rank has exited."""
        return self._found(self._assembler.finish())

    def _found(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        now = time.time()
        found = [search(without_colours(line), self._patterns) for line in lines]
        records = [{"time": now, **record} for record in found if record is not None]
        self.lines += sum(map(bool, lines))
        self.matches += len(records)
        return records
