"""The line of ``%%distributed``: its words and arguments, and its options' names for the launcher's arguments."""

from __future__ import annotations

import difflib
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

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


def arguments_of(parser: ArgumentParser, words: Sequence[str], is_cell: bool) -> dict[str, Any]:
    """Return the values of the options, and of ``action`` and ``words``.

    Args:
        parser: The magic's.
        words: Those of its line.
        is_cell: Whether the line is that of a cell, where words need an option.

    Raises:
        UsageError: Some words belong to no option.
    """
    parsed, unknown = parser.parse_known_args(words)
    loose = {*unknown, *([parsed.action, *parsed.words] if is_cell and parsed.action else [])}
    if (parsed.engine or "").startswith("slurm"):  # else --time is short for --timeout
        own = set(re.findall(r"--[\w-]+", parser.format_usage()))
        loose.update(word for word in words if word.startswith("--") and word.partition("=")[0] not in own)
    if loose and parsed.engine is not None:
        in_order = [word for word in words if word in loose]
        quoted = " ".join([parsed.engine, *map(shlex.quote, in_order)])
        raise UsageError(
            f'unrecognized arguments: {" ".join(in_order)}; put the engine\'s words in quotes: --engine "{quoted}"'
        )
    if unknown:
        options = re.findall(r"--[\w-]+", parser.format_usage())
        typed = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(typed, options, n=1) if typed.startswith("--") else []
        near = ["-n"] if typed.replace("_", "-") == "--nproc-per-node" else near  # torchrun's
        meant = f": did you mean {near[0]}?" if near else ""
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    return vars(parsed)


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
