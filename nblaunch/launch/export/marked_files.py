"""Files that an export has written and may replace, unless they were edited since."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from nblaunch.errors import ArgumentError

_MARK = re.compile(r"^# Written by nblaunch\.export \[(\w+)\].*\n", re.MULTILINE)
_DIGEST_CHARS = 12


def marked(text: str) -> str:
    """Return a text with the line by which a later export knows it, as the first or after ``#!``."""
    first, _, rest = text.partition("\n") if text.startswith("#!") else ("", "", text)
    start = f"{first}\n" if first else ""
    digest = hashlib.blake2b(f"{start}{rest}".encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{start}# Written by nblaunch.export [{digest}]\n{rest}"


def is_ours(path: Path) -> bool:
    """Return True if an earlier export has written a file, and it was not edited since."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return False
    mark = _MARK.search(text)
    return mark is not None and marked(text.replace(mark[0], "", 1)) == text


def check(target: Path, texts: Sequence[Path], data: Sequence[Path], force: bool) -> None:
    """Raise ArgumentError if a file exists that is not an earlier export's."""
    if force:
        return
    is_again = is_ours(target)
    for path in (*texts, *data):
        if path.exists() and not (is_again if path in data else is_ours(path)):
            edited = (
                ", and it was edited since it was exported" if path in texts and _MARK.search(path.read_text()) else ""
            )
            raise ArgumentError(f"path={str(target)!r}: {path} exists{edited}: use another name, or force=True")
