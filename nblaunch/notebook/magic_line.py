"""The lines of ``%%distributed`` and ``%distributed``: their parsers and words, and errors in terms of flags."""

from __future__ import annotations

import difflib
import keyword
import re
import shlex
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.utils.process import arg_split  # type: ignore[attr-defined]  # a name that it imports

from nblaunch.launch.options import TABLE, flag_of

_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\]"""
_METRIC = re.compile(rf"(?<!\S)(--metrics?)(?:=|\s+(?!-))((?:{_QUOTED})+)(?!\S)")
"""The option, or what is often written for it, and its pattern: quoted as in a shell, with backslashes kept."""


class LineParser(MagicArgumentParser):
    """The parser of a magic's line. Options that are not given have no value."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(name, description=about, argument_default=SUPPRESS)
        self.allow_abbrev = False

    def add_options(self, names: Sequence[str]) -> None:
        for name in names:
            option = TABLE[name]
            if option.help:
                self.add_argument(*(option.flags or [flag_of(name)]), dest=name, help=option.help, **option.parsing)

    def values(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values of the words by name."""
        parsed, unknown = self.parse_known_args(words)
        if not unknown:
            return vars(parsed)
        said = f"unrecognized arguments: {' '.join(unknown)}"
        if "engine" in parsed:
            quoted = " ".join([parsed.engine, *map(shlex.quote, unknown)])
            raise UsageError(f'{said}; put the engine\'s words in quotes: --engine "{quoted}"')
        typed = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(typed, self._option_string_actions, n=1) if typed.startswith("--") else []
        takes_ranks = any(action.dest == "num_processes" for action in self._actions)
        if typed.replace("_", "-") == "--nproc-per-node" and takes_ranks:  # torchrun's
            near = ["-n"]
        if near:
            raise UsageError(f"{said}: did you mean {near[0]}?")
        usage = f"write {self.usage_line}"
        raise UsageError(f"{said}; {usage if len(usage) < 100 else '%distributed help lists the options'}")

    @property
    def usage_line(self) -> str:
        return " ".join(self.format_usage().removeprefix("::").split())


def words_of(line: str, expand: Callable[[str], str]) -> list[str]:
    """Return the words of the magic's line: patterns as typed, the rest expanded."""
    first, *parts = _METRIC.split(line)
    try:
        words = arg_split(expand(first), posix=True)  # without the quotes of 'ssh gpu1 gpu2'
        for option, pattern, rest in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            unquoted = "".join(part[1:-1] if part[0] in "'\"" else part for part in re.findall(_QUOTED, pattern))
            words += [f"{option}={unquoted}", *arg_split(expand(rest), posix=True)]
    except ValueError:
        raise UsageError(f"%%distributed {line}: unclosed quote") from None
    return words


def ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text}: must be comma-separated numbers, as in 0,2") from None


def python_name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ArgumentTypeError(f"{text}: must be a valid Python name")
    return text


def in_flags(error: Exception) -> UsageError:
    """Return the error for a user of the magic: ``num_processes=0: …`` becomes ``--num-processes 0: …``."""
    name, equals, rest = str(error).partition("=")
    if not equals or not name.isidentifier():
        return UsageError(str(error))
    if name == "metric_patterns":
        rest = rest.replace(r"\\", "\\")  # cells do not double backslashes
    rest = re.sub(r"\bengine='", "--engine '", rest)
    return UsageError(f"{flag_of(name)} {rest}")
