"""The panel's script and style sheet, as widgets carry them to the page.

The page loads a widget's script as one module from a Blob, where relative imports fail, so this joins the modules of
``static/`` by regular expressions. A bundler would need Node where nblaunch is built, and a built file that editable
installs and tests must keep current. The expressions rely on a form that ``tests/unit/test_panel_js.py`` checks: static
imports of files in this folder, imported modules first, names that are unique across modules, and no string that spans
lines.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import [^;]+ from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async function|function|class|const|let)", re.MULTILINE)
_COMMENT = re.compile(r"^ *//.*\n|^ */\*\*(?:[^*]|\*(?!/))*\*/\n|/\*\*(?:[^*\n]|\*(?!/))*\*/ ?", re.MULTILINE)
_INDENT = re.compile(r"^ +", re.MULTILINE)


@functools.cache
def script() -> str:
    """Return the panel's modules as one, without comments and indentation.

    A page loads it from a Blob, where relative imports fail.
    """
    texts = [_EXPORT.sub("", _IMPORT.sub("", text)) for text in modules("panel.js").values()]
    return _bare("\n".join(texts))


@functools.cache
def loader() -> str:
    """Return the module that each panel's widget carries: it loads the script."""
    return _bare((STATIC / "loader.js").read_text(encoding="utf-8"))


def _bare(text: str) -> str:
    return _INDENT.sub("", _COMMENT.sub("", text))


@functools.cache
def style() -> str:
    """Return the panel's style sheet."""
    return (STATIC / "panel.css").read_text(encoding="utf-8")


def modules(name: str, found: dict[str, str] | None = None) -> dict[str, str]:
    """Return the text of a module and of all that it imports, imported modules first.

    Args:
        name: The file name of the module.
        found: Modules that are already known; extended in place.
    """
    found = {} if found is None else found
    text = (STATIC / name).read_text(encoding="utf-8")
    for imported in _IMPORT.findall(text):
        if imported not in found:
            modules(imported, found)
    found[name] = text
    return found
