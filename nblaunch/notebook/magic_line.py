"""The line of ``%%distributed``: its words, and its options' names for the launcher's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable

from IPython.core.error import UsageError
from IPython.utils.process import arg_split  # type: ignore[attr-defined]  # a name that it imports

_OPTIONS = {"metric_patterns": "metric", "num_nodes": "nodes", "on_error": "pdb"}
"""Arguments of the launcher whose option has another name."""
_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\]"""
_METRIC = re.compile(rf"(?<!\S)(--me[a-z]*)(?:=|\s+(?!-))((?:{_QUOTED})+)(?!\S)")
"""The option or an abbreviation, and its pattern: quoted as in a shell, with backslashes kept."""


def words_of(line: str, expand: Callable[[str], str]) -> list[str]:
    """Return the words of the magic's line: patterns as typed, the rest expanded.

    Raises:
        UsageError: A quote is not closed.
    """
    first, *parts = _METRIC.split(line)
    try:
        words = arg_split(expand(first), posix=True)  # without the quotes of 'ssh gpu1 gpu2'
        for option, pattern, rest in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            unquoted = "".join(part[1:-1] if part[0] in "'\"" else part for part in re.findall(_QUOTED, pattern))
            words += [f"{option}={unquoted}", *arg_split(expand(rest), posix=True)]
    except ValueError:
        raise UsageError(f"%%distributed {line}: unclosed quote") from None
    return words


def ranks_of(option: str, text: str | None) -> tuple[int, ...] | None:
    """Return the ranks that an option names; None if it is not given.

    Raises:
        UsageError: They are no numbers.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text}: must be comma-separated numbers, as in {option} 0,2") from None


def as_option(message: str) -> str:
    """Rewrite ``num_processes=0: …`` as the magic's option: ``--num-processes 0: …``."""
    name, equals, rest = message.partition("=")
    if not equals or not name.isidentifier():
        return message
    if name == "metric_patterns":
        rest = rest.replace(r"\\", "\\")  # cells do not double backslashes
    rest = re.sub(r"\bengine='", "--engine '", rest)
    return f"{option_of(name)} {rest}"


def option_of(name: str) -> str:
    """Return the magic's option for an argument of the launcher."""
    return f"--{_OPTIONS.get(name, name).replace('_', '-')}"
