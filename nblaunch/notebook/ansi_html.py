"""Terminal lines with colour sequences, as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from nblaunch.launch.output.terminal_lines import Excerpt, LineAssembler, without_colours
from nblaunch.notebook.charts import clean

MAX_INPUT_LENGTH = 4500
"""Characters of any text that are read: a huge text costs little."""
_MAX_FIRST_LINES, _MAX_LAST_LINES = 100, 300
"""Lines of a block that are read."""
_SGR = re.compile(r"\x1b\[([0-9;:]*)m")
_PALETTE = (
    (110, 110, 110), (201, 68, 58), (46, 138, 79), (156, 118, 16), (63, 120, 214), (168, 84, 184), (24, 136, 150),
    (128, 128, 128),
)  # fmt: skip
"""Black to white as mid-tones, legible on white and on black."""


def cut(text: str, most: int) -> str:
    """Return at most `most` characters of `text`."""
    return text if len(text) <= most else text[:most] + "…"


def terminal_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines as a terminal would show them, each with its own colours."""
    for line in lines:
        data = line[:MAX_INPUT_LENGTH].replace("\n", " ").encode(errors="replace")
        yield from LineAssembler().feed(data + b"\n")


def block(lines: Sequence[str], size: int) -> str:
    """Return lines as at most `size` bytes of HTML; omit lines in the middle."""
    excerpt = Excerpt(size // 4, size * 3 // 4)
    left_out = len(lines) - _MAX_FIRST_LINES - _MAX_LAST_LINES
    if left_out > 0:
        lines = [*lines[:_MAX_FIRST_LINES], f"… {left_out} lines omitted …", *lines[-_MAX_LAST_LINES:]]
    for line in terminal_lines(lines):
        excerpt.add(coloured(line, 300))
    return excerpt.text(f"… {excerpt.left_lines} lines omitted …")


def coloured(line: str, characters: int) -> str:
    """Return a line as HTML of at most six bytes a character; drop its colours if they take more."""
    parts, left = [], characters
    for colour, text in _runs(line):
        shown = escape(clean(cut(text, left)), quote=False)
        parts.append(f'<span style="{colour}">{shown}</span>' if colour else shown)
        left -= len(text)
        if left < 0:
            break
    html = "".join(parts)
    if len(html.encode()) <= 6 * characters:
        return html
    return escape(clean(cut(without_colours(line), characters)), quote=False)


def _runs(line: str) -> Iterator[tuple[str, str]]:
    """Yield runs of one style: the CSS and the text. Each colour sequence of a line sets the whole style."""
    first, *rest = _SGR.split(line)
    for parameters, text in zip(["", *rest[::2]], [first, *rest[1::2]], strict=True):
        if text:
            yield _css(parameters), text


def _css(parameters: str) -> str:
    """Return the CSS of SGR parameters (ECMA-48, 8.3.117, and xterm's colours)."""
    styles = {}
    codes = [int(code or 0) for code in re.split("[;:]", parameters)] if parameters else []
    while codes:
        code = codes.pop(0)
        if code == 1:
            styles["font-weight"] = "bold"
        elif code == 2:
            styles["opacity"] = "0.7"
        elif code == 3:
            styles["font-style"] = "italic"
        elif code == 4:
            styles["text-decoration"] = "underline"
        elif 30 <= code <= 37 or 90 <= code <= 97:
            styles["color"] = _rgb(_PALETTE[code % 10])
        elif 40 <= code <= 47 or 100 <= code <= 107:
            styles["background"] = _rgb(_PALETTE[code % 10])
        elif code in (38, 48):
            colour = _extended(codes)
            if colour:
                styles["color" if code == 38 else "background"] = _rgb(_mid_tone(colour))
    if "background" in styles:
        styles["color"] = "#fff"
    return ";".join(f"{name}:{value}" for name, value in styles.items())


def _rgb(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


def _extended(codes: list[int]) -> tuple[int, int, int] | None:
    """Take the colour after 38 or 48 off `codes`; None if there is none."""
    kind = codes.pop(0) if codes else 0
    if kind == 2 and len(codes) >= 3:
        red, green, blue = (min(255, codes.pop(0)) for _ in range(3))
        return red, green, blue
    if kind == 5 and codes:
        index = min(255, codes.pop(0))
        if index < 16:
            return _PALETTE[index % 8]
        if index >= 232:
            return (8 + 10 * (index - 232),) * 3
        red, green, blue = (index - 16) // 36, (index - 16) // 6 % 6, (index - 16) % 6
        return tuple(55 + 40 * part if part else 0 for part in (red, green, blue))  # type: ignore[return-value]
    return None


def _mid_tone(colour: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the colour, darker or lighter as legibility on white and black needs: WCAG contrast 3 to both."""
    parts = [(part / 255) ** 2.2 for part in colour]
    light = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    if light > 0.3:
        parts = [part * 0.3 / light for part in parts]
    elif light < 0.12:
        parts = [part + (1 - part) * (0.12 - light) / (1 - light) for part in parts]
    red, green, blue = (round(255 * part ** (1 / 2.2)) for part in parts)
    return red, green, blue
