"""From the bytes of one stream of one rank to the lines that a terminal would show.

Pure: no files, no clock. Not a terminal emulator: there is one line, the cursor moves within it, and what would
leave it (cursor movement, titles, screen modes) is dropped.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

_KEEP = 2000
"""Characters kept at each end of a line that is too long."""
_CHUNK = 2 * _KEEP
_ESCAPE_REACH = 80
"""No incomplete escape sequence is longer than this; see the repeat counts in the patterns."""

_SPECIAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_SGR = re.compile(r"\x1b\[([0-9;:]*)m")
_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x08\x0b-\x1f\x7f]+)"
    r"|(?P<return>\r)"
    r"|(?P<back>\x08)"
    r"|\x1b\[(?P<colour>[0-9;:]{0,64})m"
    r"|\x1b\[(?P<erase>[02]?)K"
    r"|\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|(?=\x1b)|(?P<string>\Z))"  # a title, or other text that is not shown
    r"|\x1b[ -/]{0,8}[0-~]"
    r"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]+|."
)
_PLAIN = r"[^\x00-\x08\x0b-\x1f\x7f]*"
_ONLY_COLOURS = re.compile(rf"{_PLAIN}(?:\x1b\[[0-9;:]{{0,64}}m{_PLAIN})*")
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}|[ -/]{0,8})")
_STRING_END = re.compile(r"\x07|(?=\x1b)")

_CODE = re.compile(r"(?:^|;)([345]8;5;[0-9]*|[345]8;2;[0-9]*;[0-9]*;[0-9]*|[0-9:]*)")
_SWITCHED_OFF_BY = {
    22: (1, 2), 23: (3,), 24: (4, 21), 25: (5, 6), 27: (7,), 28: (8,), 29: (9,),
    39: (30,), 49: (40,), 55: (53,), 59: (58,),
}  # fmt: skip


class LineAssembler:
    """Completed lines of text from bytes, however these are split over calls.

    Bytes that are not UTF-8 become U+FFFD, control characters are dropped, carriage return, backspace and the erasing
    of a line do what they do on a terminal, and colours are kept: every line carries its own and ends without. A long
    line keeps its first and last 2,000 characters, in bounded memory.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = _Line()
        self._colour = ""
        self._pending = ""
        """The beginning of an escape sequence whose end has not come yet."""
        self._in_string = False

    @property
    def partial(self) -> str:
        """The line that has not ended yet, as a terminal would show it."""
        return self._line.render()

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their line ends."""
        text = self._pending + self._decoder.decode(data)
        *ended, rest = text.replace("\r\n", "\n").split("\n")
        self._pending = ""
        lines = [self._whole_line(segment) for segment in ended]
        self._interpret(self._hold_back(rest))
        return lines

    def finish(self) -> list[str]:
        """The rest, now that the stream has ended or been cut; none where a terminal would show nothing."""
        lines = self.feed(self._decoder.decode(b"", final=True).encode())
        rest = self.partial
        self._reset()  # no state may leak over a cut
        return [*lines, rest] if rest.strip() else lines

    def _whole_line(self, text: str) -> str:
        """Finish the line with `text`; the two usual cases need no cells."""
        if not (self._line.cells or self._in_string):
            if not self._colour and not _SPECIAL.search(text):
                return text if len(text) <= _CHUNK else shorten(text)
            if len(text) <= _CHUNK and _ONLY_COLOURS.fullmatch(text):
                return self._coloured(text)
        self._interpret(text)
        return self._end_line()

    def _coloured(self, text: str) -> str:
        first, *rest = _SGR.split(text)
        runs = [(self._colour, first)]
        for parameters, shown in zip(rest[::2], rest[1::2], strict=True):
            self._colour = _colour_after(self._colour, parameters)
            runs.append((self._colour, shown))
        return _join([(f"\x1b[{colour}m" if colour else "", shown) for colour, shown in runs if shown])

    def _end_line(self) -> str:
        line = self._line.render()
        self._line = _Line()
        self._in_string = False  # a title that never ended must not swallow the lines that follow
        return line

    def _hold_back(self, rest: str) -> str:
        at = rest.rfind("\x1b", max(0, len(rest) - _ESCAPE_REACH))
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
            kind = token.lastgroup
            if kind == "text":
                self._line.write(token[0], f"\x1b[{self._colour}m" if self._colour else "")
            elif kind == "return":
                self._line.cursor = 0
            elif kind == "back":
                self._line.cursor = max(0, self._line.cursor - 1)
            elif kind == "colour":
                self._colour = _colour_after(self._colour, token["colour"])
            elif kind == "erase":
                self._line.erase(everything=token["erase"] == "2")
            elif kind == "string":
                self._in_string = True


class _Line:
    """The line that the cursor is on: a cell for each character, with its colour before it.

    Of a long line the middle is gone: ``cells`` holds columns 0 to ``_KEEP``, then those from ``_KEEP + left_out`` on.
    """

    __slots__ = ("cells", "cursor", "left_out")

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.cursor = 0
        self.left_out = 0

    def write(self, text: str, colour: str) -> None:
        """Put `text` at the cursor, over what is there."""
        for at in range(0, len(text), _CHUNK):
            chunk = text[at : at + _CHUNK]
            self._put([colour + character for character in chunk] if colour else chunk)

    def _put(self, cells: str | list[str]) -> None:
        start, after_gap = self.cursor, _KEEP + self.left_out
        self.cursor += len(cells)
        if self.left_out and start < after_gap:
            before = cells[: max(0, _KEEP - start)]
            self.cells[start : start + len(before)] = before
            cells = cells[after_gap - start :]
            start = after_gap
        if cells:
            start -= self.left_out
            self.cells[start : start + len(cells)] = cells
        if len(self.cells) > 2 * _CHUNK:  # at twice what is kept, so that cutting costs little for each character
            excess = len(self.cells) - _CHUNK
            del self.cells[_KEEP : _KEEP + excess]
            self.left_out += excess

    def erase(self, everything: bool) -> None:
        """Erase from the cursor on, or everything: the cursor goes to the start then, as programs do right after."""
        if everything:
            self.cursor = 0
        if self.cursor < _KEEP:
            del self.cells[self.cursor :]
            self.left_out = 0
        elif self.cursor < _KEEP + self.left_out:
            del self.cells[_KEEP:]
            self.left_out = self.cursor - _KEEP
        else:
            del self.cells[self.cursor - self.left_out :]

    def render(self) -> str:
        if len(self.cells) <= _CHUNK and not self.left_out:
            return _picture(self.cells)
        tail = self.cells[max(_KEEP, len(self.cells) - _KEEP) :]
        left_out = self.left_out + len(self.cells) - _KEEP - len(tail)
        return _picture(self.cells[:_KEEP]) + _gap(left_out) + _picture(tail)


class Excerpt:
    """The first and last lines of a burst, and how much is left out between them.

    Args:
        head_bytes: How much of the beginning to keep.
        tail_bytes: How much of the end.
        tail_lines: How many lines of the end. Default: as many as fit.
        prefix: Goes before each line, and counts for what is kept but not for what is left out. Default: none.
    """

    def __init__(self, head_bytes: int, tail_bytes: int, tail_lines: int | None = None, prefix: str = "") -> None:
        self.head: list[str] = []
        self.tail: deque[str] = deque()
        self.left_lines = 0
        self.left_bytes = 0
        self.uncounted = False
        """Nobody counted the lines of some part that is left out."""
        self._head_size = self._tail_size = 0
        self._most = (head_bytes, tail_bytes, tail_lines)
        self._prefix = prefix

    @property
    def size(self) -> int:
        """Bytes of the lines that are kept."""
        return self._head_size + self._tail_size

    def text(self, gap: str) -> str:
        """The lines that are kept, with `gap` as a line where some are left out."""
        gaps = [gap] if self.left_bytes and gap else []
        return "".join(f"{self._prefix}{line}\n" for line in (*self.head, *gaps, *self.tail))

    def add(self, line: str) -> None:
        """One more line."""
        head_bytes, tail_bytes, tail_lines = self._most
        size = self._cost(line)
        if not (self.tail or self.left_bytes) and self._head_size + size <= head_bytes:
            self.head.append(line)
            self._head_size += size
            return
        self.tail.append(line)
        self._tail_size += size
        while self._tail_size > tail_bytes or (tail_lines is not None and len(self.tail) > tail_lines):
            self._leave_out_of_tail()

    def skip(self, lines: int, size: int) -> None:
        """So many lines (-1: nobody counted them) and bytes follow that are left out, with what lies just before."""
        while self.tail:
            self._leave_out_of_tail()
        self.left_bytes += size
        self.left_lines += max(0, lines)
        self.uncounted = self.uncounted or lines < 0

    def cut(self, most: int) -> None:
        """Leave out more, until not more than `most` bytes are kept: a quarter of it from the beginning."""
        if self.size <= most:
            return
        while self.head and self._head_size > most // 4:
            line = self.head.pop()
            self._head_size -= self._cost(line)
            if self.left_bytes:
                self._leave_out(line)
            else:
                self.tail.appendleft(line)
                self._tail_size += self._cost(line)
        while self.tail and self.size > most:
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


def fair_shares(wanted: Sequence[int], most: int) -> list[int]:
    """Of `most`, what each gets who wants so much: all of it, or the same as others who do not get all."""
    shares = [0] * len(wanted)
    smallest_first = sorted(range(len(wanted)), key=wanted.__getitem__)
    for served, index in enumerate(smallest_first):
        shares[index] = min(wanted[index], most // (len(wanted) - served))
        most -= shares[index]
    return shares


def _byte_count(line: str) -> int:
    return 1 + (len(line) if line.isascii() else len(line.encode(errors="replace")))


def shorten(line: str) -> str:
    """A line of plain text with the middle left out where it is longer than 4,000 characters."""
    if len(line) <= _CHUNK:
        return line
    return line[:_KEEP] + _gap(len(line) - _CHUNK) + line[-_KEEP:]


def without_colours(text: str) -> str:
    """`text` without its colour sequences."""
    return _SGR.sub("", text) if "\x1b" in text else text


def _gap(count: int) -> str:
    return f"… [{count:,} characters left out] …"


def _picture(cells: list[str]) -> str:
    text = "".join(cells)
    return _join([(cell[:-1], cell[-1]) for cell in cells]) if "\x1b" in text else text


def _join(runs: list[tuple[str, str]]) -> str:
    """The text of (colour, text) pairs, each stretch of one colour in that colour and reset after it."""
    stretches = ((colour, "".join(text for _, text in run)) for colour, run in groupby(runs, itemgetter(0)))
    return "".join(f"{colour}{text}\x1b[0m" if colour else text for colour, text in stretches)


@lru_cache(maxsize=1024)
def _colour_after(colour: str, parameters: str) -> str:
    """The SGR parameters in force after `parameters`, if those of `colour` were: ECMA-48, 8.3.117, and xterm's."""
    active: dict[int, str] = {}
    for code in _CODE.findall(f"{colour};{parameters}" if colour else parameters):
        number = int(re.split("[;:]", code)[0] or 0)
        if number == 0:
            active.clear()
        for slot in _SWITCHED_OFF_BY.get(number, ()):
            active.pop(slot, None)
        sets = _slot(number)
        if sets is not None:
            active.pop(sets, None)
            active[sets] = code
    return ";".join(active.values())


def _slot(number: int) -> int | None:
    """What a code sets: 30 stands for the foreground, 40 for the background, others for themselves."""
    if 30 <= number <= 38 or 90 <= number <= 97:
        return 30
    if 40 <= number <= 48 or 100 <= number <= 107:
        return 40
    return number if 1 <= number <= 9 or number in (21, 53, 58) else None
