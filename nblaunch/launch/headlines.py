"""The headline of an error: one sentence of a message that may be a whole traceback, a paragraph, or a tensor."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_HEADLINE = 160
"""Characters: two lines of a panel."""
_MAX_DETAILS = 4000
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^(?:[\w<>]+\.)*(?P<type>\w+)(?:: (?P<text>.*))?$")
"""The line of a traceback that names the exception."""
_CAUGHT = re.compile(r"\s*Caught \w+ (?P<where>in .+)\.$", re.MULTILINE)
"""How torch begins an exception that another process or thread has raised."""
_SENTENCE_END = re.compile(r"(?<=[\w)\]}'\"`]{2}[.!?])\s+(?=[A-Z`'\"(])")


class Headline(NamedTuple):
    """A message in parts."""

    type_name: str
    text: str
    """At most `MAX_HEADLINE` characters, without line breaks."""
    details: str
    """The message, if the headline leaves something out that no traceback has."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.type_name, self.text)))


def headline_of(type_name: str, message: str) -> Headline:
    """Return the headline of an error.

    Args:
        type_name: The name of its type.
        message: Its ``str``. If that holds a traceback, the headline is of the exception that the traceback ends with.
    """
    message = message.strip()
    inner = _innermost(message)
    if inner is None:
        text = _first_sentence(message)
        return Headline(type_name, text, "" if text == message else message[:_MAX_DETAILS])
    caught = _CAUGHT.match(message)
    where = f" ({caught['where'].replace('worker process', 'worker')})" if caught else ""
    inner_type, inner_message = inner
    text = _first_sentence(inner_message, MAX_HEADLINE - len(where))
    return Headline(inner_type, f"{text}{where}".strip(), "")


def _innermost(message: str) -> tuple[str, str] | None:
    """Return type and message of the exception that ends the last traceback in a message; None if it has none."""
    _, mark, trace = message.rpartition(_TRACEBACK)
    lines = trace.strip('\n"').splitlines()
    for number, line in enumerate(lines if mark else []):
        found = _RAISED.match(line)
        if found is not None:
            return found["type"], "\n".join([found["text"] or "", *lines[number + 1 :]])
    return None


def _first_sentence(message: str, most: int = MAX_HEADLINE) -> str:
    """Return the first sentence of a message in one line, cut where it is too long."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = lines.pop(0) if lines else ""
    if text.endswith(":") and lines and len(text) < most:
        text = f"{text} {lines[0]}"  # such as "backend='inductor' raised:"
    text = " ".join(_SENTENCE_END.split(text, 1)[0].split())
    if len(text) <= most:
        return text
    words = text[: most - 2].rpartition(" ")[0]
    return f"{words.rstrip(' ,;:')} …" if words else f"{text[: most - 1]}…"
