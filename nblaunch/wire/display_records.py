"""Records of what ranks display, in their spools, and the limits.

A record is one line of JSON. Images and long texts are in files of their own beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_OUTPUTS = 100
"""Of one rank at a time: further ones are left out and counted until ``clear_output``."""
MAX_OUTPUT_BYTES = 4 << 20
"""Of one output; a larger one is shown as its text."""
MAX_KEPT_BYTES = 16 << 20
"""Of all outputs that a rank shows at a time."""
MAX_SPOOLED_BYTES = 16 << 20
"""Of all records of a rank, replaced ones included."""
MAX_INLINE_BYTES = 4 << 10
"""Of a body in the record itself; a larger one is in a file."""
MAX_TEXT_CHARS = 4000
"""Of the text that stands for an output where only text can be shown."""
SUFFIXES = {
    "text/html": "html",
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/svg+xml": "svg",
    "text/markdown": "md",
    "text/latex": "tex",
    "text/plain": "txt",
}
"""The types of bodies, the most expressive first, and the endings of their files."""
BITMAPS = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""Types whose bodies are bytes: always in a file."""
_FIELD = "display"
"""The field that marks these records in a spool."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An output of a rank; it replaces an earlier one with the same key."""

    key: str
    """The process and its count of outputs."""
    mime: str
    text: str
    """Stands for the output where only text can be shown."""
    body: str | None = None
    """None if it is in a file: `launch_files.output_file`."""
    size: int = 0
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The rank has removed its outputs."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The number of outputs that the limits have left out since the start, or the last `Cleared`."""

    count: int


DisplayRecord = Shown | Cleared | LeftOut
_KINDS: dict[str, type[DisplayRecord]] = {kind.__name__: kind for kind in (Shown, Cleared, LeftOut)}


def to_line(record: DisplayRecord) -> dict[str, Any]:
    return {_FIELD: type(record).__name__, **dataclasses.asdict(record)}


def from_line(line: Mapping[str, Any]) -> DisplayRecord | None:
    """Return the record of a line in a spool; None for another kind of line."""
    fields = dict(line)
    kind = _KINDS.get(fields.pop(_FIELD, ""))
    return None if kind is None else kind(**fields)


def is_display(line: Mapping[str, Any]) -> bool:
    return _FIELD in line
