"""The names of one rank of a session, for the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nblaunch.machine.segments import in_words
from nblaunch.wire.session_messages import Bound


class RankNames:
    """The names of one rank of a session: ``session[0]["model"]`` is the repr of its value there.

    Args:
        who: Returns what the rank has bound.
        repr_of: Returns the repr of an expression's value.
    """

    def __init__(self, who: Callable[[], Sequence[Bound]], repr_of: Callable[[str], str]) -> None:
        self._who, self._repr_of = who, repr_of

    def __getitem__(self, expression: str) -> Shown:
        return Shown(self._repr_of(expression))

    def __repr__(self) -> str:
        return "\n".join(map(line_of, self._who())) or "(no names)"

    def _ipython_key_completions_(self) -> list[str]:
        return [each.name for each in self._who()]


class Shown(str):
    """Text that a notebook shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def line_of(bound: Bound) -> str:
    """Describe a name in one line."""
    size = f", {in_words(bound.size)}" if bound.size > 10_000 else ""
    return f"{bound.name}: {bound.type_name}{' ' + bound.detail if bound.detail else ''}{size}"
