"""From the bytes of one stream to the lines that a terminal would show.

Not a terminal emulator: the cursor moves within one line, or within the last few. Sequences that move it elsewhere, set
titles or switch modes are dropped.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from nblaunch.engines.protocol import Log

_END_LENGTH = 2000
"""Characters kept at each end of a long line."""
_MAX_LENGTH = 2 * _END_LENGTH
_GAP = "… [characters left out] …"
_BARS = 8
"""Rows that the cursor can be in, for nested progress bars."""
_MAX_ESCAPE_LENGTH = 80
"""Bounds an incomplete escape sequence; see the repeat counts in the patterns."""

_SPECIAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_SGR = re.compile(r"\x1b\[([0-9;:]*)m")
_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x08\x0b-\x1f\x7f]+)"
    r"|(?P<return>\r)"
    r"|(?P<back>\x08)"
    r"|\x1b\[(?P<colour>[0-9;:]{0,64})m"
    r"|\x1b\[(?P<erase>[02]?)K"
    r"|\x1b\[(?P<up>[0-9]{0,3})A"
    r"|\x1b\[(?P<down>[0-9]{0,3})B"
    r"|\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|(?=\x1b)|(?P<string>\Z))"  # a title or other hidden text
    r"|\x1b[ -/]{0,8}[0-~]"
    r"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]+|."
)
_PLAIN = r"[^\x00-\x08\x0b-\x1f\x7f]*"
_ONLY_COLOURS = re.compile(rf"{_PLAIN}(?:\x1b\[[0-9;:]{{0,64}}m{_PLAIN})*")
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}|[ -/]{0,8})")
_STRING_END = re.compile(r"\x07|(?=\x1b)")

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CODE = re.compile(r"(?:^|;)([345]8;5;[0-9]*|[345]8;2;[0-9]*;[0-9]*;[0-9]*|[0-9:]*)")
_SWITCHED_OFF_BY = {
    22: (1, 2), 23: (3,), 24: (4, 21), 25: (5, 6), 27: (7,), 28: (8,), 29: (9,),
    39: (30,), 49: (40,), 55: (53,), 59: (58,),
}  # fmt: skip


class LineAssembler:
    """Assembles lines of text from bytes that arrive in arbitrary pieces.

    Invalid UTF-8 becomes U+FFFD. Carriage return, backspace and erase-in-line work as on a terminal; other control
    characters are dropped. Colours are kept: each line sets its own and resets them at its end. A long line keeps its
    first and last 2,000 characters, in bounded memory.

    Attributes:
        retracted: How many lines of earlier calls the last `feed` takes back, because the cursor has moved up to them.
    """

    def __init__(self) -> None:
        self.retracted = 0
        self._reset()

    def _reset(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rows = [_Row()]
        self._row = 0
        self._held = 1
        """Rows that may still change: more than one once the cursor has moved up."""
        self._ends = 0
        self._recent: deque[str] = deque(maxlen=_BARS)
        self._lines: list[str] = []
        self._colour = ""
        self._pending = ""
        self._in_string = False

    @property
    def partials(self) -> list[str]:
        """All unfinished lines that show something."""
        return [text for row in self._rows if (text := row.render()).strip()]

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes, without line ends."""
        text = self._pending + self._decoder.decode(data)
        *ended, rest = text.replace("\r\n", "\n").split("\n")
        self._pending, self._lines, self.retracted = "", [], 0
        for segment in ended:
            self._finish_line(segment)
        self._interpret(self._hold_back(rest))
        return self._lines

    def finish(self) -> list[str]:
        """End the stream, and return the remaining lines; none if a terminal would show nothing."""
        lines = self.feed(self._decoder.decode(b"", final=True).encode())
        rest = [row.render() for row in self._rows]
        while rest and not rest[-1].strip():
            rest.pop()
        self._reset()  # the next data may follow a gap
        return lines + rest

    def _finish_line(self, text: str) -> None:
        """Finish the line with `text`. The two common cases need no cells."""
        first = self._rows[0]
        if len(self._rows) == 1 and not (first.cells or first.cursor or self._in_string):
            if not self._colour and not _SPECIAL.search(text):
                return self._emit(text if len(text) <= _MAX_LENGTH else shorten(text))
            if len(text) <= _MAX_LENGTH and _ONLY_COLOURS.fullmatch(text):
                return self._emit(self._coloured(text))
        self._interpret(text)
        self._in_string = False  # an unterminated title must not swallow the next lines
        return self._end_row()

    def _coloured(self, text: str) -> str:
        runs = []
        for parameters, shown in coloured_runs(text):
            if parameters is not None:
                self._colour = _colour_after(self._colour, parameters)
            runs.append((f"\x1b[{self._colour}m" if self._colour else "", shown))
        return _join([(colour, shown) for colour, shown in runs if shown])

    def _end_row(self) -> None:
        if self._row < len(self._rows) - 1:
            self._row += 1
            self._rows[self._row].cursor = 0
            return
        self._ends += 1
        if self._ends >= 2:
            self._held = 1  # the bars have ended: lines are final at once
        self._rows.append(_Row())
        while len(self._rows) > self._held:
            self._emit(self._rows.pop(0).render())
        self._row = len(self._rows) - 1

    def _emit(self, line: str) -> None:
        self._lines.append(line)
        self._recent.append(line)

    def _move(self, rows: int) -> None:
        """Move the cursor down by so many rows; up if negative, which reopens finished lines."""
        column = self._rows[self._row].cursor
        while self._row + rows < 0 and len(self._rows) < _BARS and self._recent:
            self._reopen()
        if rows < 0:
            self._held, self._ends = max(self._held, len(self._rows)), 0
        self._row = max(0, min(self._row + rows, len(self._rows) - 1))
        self._rows[self._row].cursor = column

    def _reopen(self) -> None:
        line, row = self._recent.pop(), _Row()
        if self._lines:
            self._lines.pop()
        else:
            self.retracted += 1
        for parameters, shown in coloured_runs(line):
            row.write(shown, "" if parameters in (None, "0") else f"\x1b[{parameters}m")
        self._rows.insert(0, row)
        self._row += 1

    def _hold_back(self, rest: str) -> str:
        at = rest.rfind("\x1b", max(0, len(rest) - _MAX_ESCAPE_LENGTH))
        if at < 0 or not _INCOMPLETE.fullmatch(rest, at):
            return rest
        self._pending = rest[at:]
        return rest[:at]

    def _interpret(self, text: str) -> None:
        start = 0
        if self._in_string:
            end = _STRING_END.search(text)
            if end is None:
                return
            self._in_string, start = False, end.end()
        for token in _TOKEN.finditer(text, start):
            kind, row = token.lastgroup, self._rows[self._row]
            if kind == "text":
                row.write(token[0], f"\x1b[{self._colour}m" if self._colour else "")
            elif kind == "return":
                row.cursor = 0
            elif kind == "back":
                row.cursor = max(0, row.cursor - 1)
            elif kind == "colour":
                self._colour = _colour_after(self._colour, token["colour"])
            elif kind == "erase":
                row.erase(everything=token["erase"] == "2")
            elif kind == "up":
                self._move(-(int(token["up"] or 1) or 1))
            elif kind == "down":
                self._move(int(token["down"] or 1) or 1)
            elif kind == "string":
                self._in_string = True


class _Row:
    """A row that may change: a cell per character, prefixed with its colour. Of a long line the middle is dropped."""

    __slots__ = ("cells", "cursor")

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.cursor = 0

    def write(self, text: str, colour: str) -> None:
        for at in range(0, len(text), _MAX_LENGTH):
            chunk = text[at : at + _MAX_LENGTH]
            self.cells += [" "] * (self.cursor - len(self.cells))  # the cursor has moved from another row
            end = self.cursor + len(chunk)
            self.cells[self.cursor : end] = [colour + character for character in chunk] if colour else chunk
            self.cursor = end
            excess = len(self.cells) - _MAX_LENGTH - 1  # what is kept is still too long: the gap stays
            if excess > _MAX_LENGTH:  # twice the limit, so that cutting is amortized
                del self.cells[_END_LENGTH : _END_LENGTH + excess]
                self.cursor = max(min(self.cursor, _END_LENGTH), self.cursor - excess)

    def erase(self, everything: bool) -> None:
        """Erase from the cursor to the end, or everything.

        Everything also moves the cursor to the start, which programs do next anyway.
        """
        if everything:
            self.cursor = 0
        del self.cells[self.cursor :]

    def render(self) -> str:
        if len(self.cells) <= _MAX_LENGTH:
            return _picture(self.cells)
        return _picture(self.cells[:_END_LENGTH]) + _GAP + _picture(self.cells[-_END_LENGTH:])


class Excerpt:
    """The first and last lines of a burst of output, and the size of the gap between them.

    The prefix of each line counts towards the limits, but not towards the gap.
    """

    def __init__(self, head_bytes: int, tail_bytes: int, prefix: str = "") -> None:
        self.head: list[str] = []
        self.tail: deque[str] = deque()
        self.left_lines = 0
        self.left_bytes = 0
        self._head_size = self._tail_size = 0
        self._most = head_bytes, tail_bytes
        self._prefix = prefix

    @property
    def size(self) -> int:
        return self._head_size + self._tail_size

    def text(self, gap: str) -> str:
        """Return the kept lines, with the line `gap` in place of the gap."""
        gaps = [gap] if self.left_bytes and gap else []
        return "".join(f"{self._prefix}{line}\n" for line in (*self.head, *gaps, *self.tail))

    def add(self, line: str) -> None:
        head_bytes, tail_bytes = self._most
        size = self._cost(line)
        if not (self.tail or self.left_bytes) and self._head_size + size <= head_bytes:
            self.head.append(line)
            self._head_size += size
            return
        self.tail.append(line)
        self._tail_size += size
        while self._tail_size > tail_bytes:
            self._leave_out_of_tail()

    def cut(self, max_bytes: int) -> None:
        """Extend the gap until at most `max_bytes` are kept, a quarter of them first lines."""
        if self.size <= max_bytes:
            return
        while self.head and self._head_size > max_bytes // 4:
            line = self.head.pop()
            self._head_size -= self._cost(line)
            if self.left_bytes:
                self._leave_out(line)
            else:
                self.tail.appendleft(line)
                self._tail_size += self._cost(line)
        while self.tail and self.size > max_bytes:
            self._leave_out_of_tail()

    def _leave_out_of_tail(self) -> None:
        line = self.tail.popleft()
        self._tail_size -= self._cost(line)
        self._leave_out(line)

    def _leave_out(self, line: str) -> None:
        self.left_lines += 1
        self.left_bytes += _byte_count(line)

    def _cost(self, line: str) -> int:
        return len(self._prefix) + _byte_count(line)


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """Split `total` fairly: each gets what it wants, or the same share as all others that want more."""
    shares = [0] * len(wanted)
    smallest_first = sorted(range(len(wanted)), key=wanted.__getitem__)
    for served, index in enumerate(smallest_first):
        shares[index] = min(wanted[index], total // (len(wanted) - served))
        total -= shares[index]
    return shares


def _byte_count(line: str) -> int:
    return 1 + (len(line) if line.isascii() else len(line.encode(errors="replace")))


def shorten(line: str) -> str:
    """Return a plain line of more than 4,000 characters without its middle."""
    return line[:_END_LENGTH] + _GAP + line[-_END_LENGTH:]


def without_colours(text: str) -> str:
    return _SGR.sub("", text) if "\x1b" in text else text


def last_lines(log: Log, count: int = 20, max_bytes: int = 16384) -> str:
    """Return the end of a log as a terminal would show it; empty if there is no log."""
    size = log.size()
    start = max(0, size - max_bytes)
    data = log.read(start, size)
    if start:
        data = data[data.find(b"\n", 0, -1) + 1 :]
    assembler = LineAssembler()
    lines = assembler.feed(data) + assembler.finish()
    return "\n".join(_CONTROL.sub("", without_colours(line)) for line in lines[-count:])


def _picture(cells: list[str]) -> str:
    text = "".join(cells)
    return _join([(cell[:-1], cell[-1]) for cell in cells]) if "\x1b" in text else text


def _join(runs: list[tuple[str, str]]) -> str:
    """Join (colour, text) pairs: each run of one colour is set once and reset at its end."""
    stretches = ((colour, "".join(text for _, text in run)) for colour, run in groupby(runs, itemgetter(0)))
    return "".join(f"{colour}{text}\x1b[0m" if colour else text for colour, text in stretches)


def coloured_runs(line: str) -> Iterator[tuple[str | None, str]]:
    """Yield the parameters of each colour sequence of a line, None before the first, and the text that follows it."""
    first, *rest = _SGR.split(line)
    yield None, first
    yield from zip(rest[::2], rest[1::2], strict=True)


@lru_cache(maxsize=1024)
def _colour_after(colour: str, parameters: str) -> str:
    """Return the parameters in effect after `colour`, then `parameters`."""
    active: dict[int, list[int]] = {}
    for found in _CODE.findall(f"{colour};{parameters}" if colour else parameters):  # xterm's colours whole: 38;5;196
        code = [int(part or 0) for part in re.split("[;:]", found)]  # ECMA-48 8.3.117
        code = [24] if code == [4, 0] else code
        if code[0] == 0:
            active.clear()
        for slot in _SWITCHED_OFF_BY.get(code[0], ()):
            active.pop(slot, None)
        sets = _slot(code[0])
        if sets is not None:
            active.pop(sets, None)
            active[sets] = code
    return ";".join((";" if len(code) in (3, 5) else ":").join(map(str, code)) for code in active.values())


def _slot(number: int) -> int | None:
    """Return the attribute that a code sets: 30 for the foreground, 40 for the background, or the code itself."""
    if 30 <= number <= 38 or 90 <= number <= 97:
        return 30
    if 40 <= number <= 48 or 100 <= number <= 107:
        return 40
    return number if 1 <= number <= 9 or number in (21, 53, 58) else None
