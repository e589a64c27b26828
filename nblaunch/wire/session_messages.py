"""The messages about what the ranks of a session have: names, questions about them, and collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from nblaunch.wire.tables import Begun

MAX_BOUND = 2_000
"""Names that a rank describes after a task; of more, the last."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A name of a kept rank, as far as it can be described without sending the value."""

    name: str
    type_name: str
    detail: str = ""
    """The shape and dtype of an array, the length of a container, or the beginning of the repr of a number."""
    size: int = 0
    """Bytes of memory, as far as they are known."""
    of_group: str = ""
    """The type, such as ``DistributedDataParallel``, that makes the value useless once its group is replaced."""


@dataclass(frozen=True, slots=True)
class CollectivesBegun:
    """The collectives that a kept rank has begun in its default process group."""

    last: Begun = field(default_factory=Begun)
    uncertain: int = 0
    """Operations of this task that the numbers do not show: point-to-point, of other groups, or of user threads."""
    is_counted: bool = False
    """Whether there is such a group."""


@dataclass(frozen=True, slots=True)
class Names:
    """Kept rank -> kernel, before `Done` and `Failed`: the names that it has bound."""

    rank: int
    task: int
    names: tuple[Bound, ...]
    private: tuple[str, ...] = ()
    """Further names that it has: those that begin with an underscore."""
    begun: CollectivesBegun = field(default_factory=CollectivesBegun)
    """The collectives that it has begun in the present process group."""
    lost: tuple[str, ...] = ()
    """Keys of tensors and modules of the notebook that it no longer has."""


@dataclass(frozen=True, slots=True)
class NamesTaken:
    """What a kept rank has made of the names that the notebook has sent with a task."""

    kept: tuple[str, ...] = ()
    """Names that it has bound itself and keeps, though the notebook's value is new."""
    replaced: tuple[str, ...] = ()
    """Values of the notebook that it had changed in place, and that the notebook's new ones have replaced."""
    apart: tuple[tuple[str, str], ...] = ()
    """Pairs of a name that was bound and a kept name, such as an optimizer and its model: the first holds tensors of
    the notebook's value of the second."""


@dataclass(frozen=True, slots=True)
class SentName:
    """A name of the notebook on its way to kept ranks."""

    value: Any
    digest: bytes
    """Of the pickled value: a rank that was sent the same before keeps what it has. Empty: the name is the ranks' own
    from now on."""
    is_forced: bool = False
    """Whether to bind it in any case: the user has pushed it."""
    ranks: tuple[int, ...] | None = None
    """Ranks that bind it; None: all."""
    holds: tuple[str, ...] = ()
    """Other names whose tensors or modules are in it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the kernel asks kept ranks about their names, in place of a function."""

    kind: Literal["value", "repr", "names", "complete", "inspect", "push", "path", "losses", "dump", "restore", "debug"]
    text: str = ""
    """An expression, or for ``complete`` the code up to the cursor."""
    ranks: tuple[int, ...] | None = None
    """Ranks that answer; None: all."""


@dataclass(frozen=True, slots=True)
class Losses:
    """The answer to ``losses``: what a restart of this rank cannot keep."""

    reasons: tuple[str, ...]
    """One for each name that the user knows and that is lost."""
    unwrapped: tuple[str, ...]
    """Names of a DistributedDataParallel that will have the module in it."""
