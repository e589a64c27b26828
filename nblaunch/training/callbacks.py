"""The callbacks of a Trainer: objects with methods that it calls at certain moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nblaunch.errors import ArgumentError

HOOKS = ("on_fit_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "on_fit_end")


def checked(callbacks: Iterable[object]) -> list[object]:
    """The callbacks, as a list.

    Raises:
        ArgumentError: One is a class, or has none of the methods: it would never be called.
    """
    if not isinstance(callbacks, Iterable):
        raise ArgumentError(f"callbacks={callbacks!r:.80}: give a list of objects")
    given = list(callbacks)
    for one in given:
        if isinstance(one, type):
            raise ArgumentError(f"callbacks: {one.__name__} is a class: give an object of it, {one.__name__}()")
        if not any(callable(getattr(one, hook, None)) for hook in HOOKS):
            raise ArgumentError(f"callbacks: {one!r:.80} has none of the methods {', '.join(HOOKS)}")
    return given


def call(callbacks: Iterable[object], hook: str, *args: Any) -> None:
    """Call a method of all that have it."""
    for one in callbacks:
        method = getattr(one, hook, None)
        if method is not None:
            method(*args)
