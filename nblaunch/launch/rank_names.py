"""The names of one rank of a session, for the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from nblaunch.errors import ArgumentError
from nblaunch.machine.segments import in_words
from nblaunch.wire.session_messages import Bound


class RankNames:
    """The names of one rank of a session: ``session[0]["model"]`` is the repr of its value there.

    Args:
        rank: The rank.
        who: Returns what each rank has bound.
        repr_of: Returns the repr of an expression's value in a rank.
        lines_of: Returns what to show of a rank's names.
    """

    def __init__(
        self,
        rank: int,
        who: Callable[[], Sequence[Sequence[Bound]]],
        repr_of: Callable[[int, str], str],
        lines_of: Callable[[int], Sequence[str]],
    ) -> None:
        self._rank, self._who, self._repr_of, self._lines_of = rank, who, repr_of, lines_of

    def __getitem__(self, expression: str) -> Shown:
        __tracebackhide__ = True  # IPython omits this frame
        return Shown(self._repr_of(self._rank, expression), expression.strip(), self._rank)

    def __setitem__(self, name: str, value: object) -> NoReturn:
        raise ArgumentError(
            f"session[{self._rank}][{name!r}] = ...: to bind a name, session.push({name}=..., ranks=[{self._rank}])"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copy and pickle look for
            raise AttributeError(name)
        raise AttributeError(f"session[{self._rank}].{name}: write session[{self._rank}][{name!r}] to see it")

    def __repr__(self) -> str:
        return "\n".join(self._lines_of(self._rank)) or "(no names)"

    def _ipython_key_completions_(self) -> list[str]:
        return [each.name for each in self._who()[self._rank]]


class Shown(str):
    """The repr of a rank's value. A notebook shows it without quotes, and how to get the value.

    Args:
        text: The repr.
        expression: What was asked for.
        rank: The rank.
    """

    _expression: str
    _rank: int

    def __new__(cls, text: str, expression: str, rank: int) -> Shown:
        shown = super().__new__(cls, text)
        shown._expression, shown._rank = expression, rank
        return shown

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def __repr__(self) -> str:
        return f"{self}\n# the repr; session.pull({self._expression!r}, ranks=[{self._rank}]) brings the value"


def line_of(bound: Bound) -> str:
    """Describe a name in one line."""
    size = f", {in_words(bound.size)}" if bound.size > 10_000 else ""
    return f"{bound.name}: {bound.type_name}{' ' + bound.detail if bound.detail else ''}{size}"
