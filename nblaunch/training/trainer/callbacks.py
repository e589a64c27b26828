"""A Trainer's callbacks: what they may be, and calls of their methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nblaunch.errors import ArgumentError

HOOKS = ("on_fit_begin", "on_epoch_begin", "on_step_end", "on_validation_end", "on_epoch_end", "on_fit_end")
"""The methods of a callback."""


class Callbacks(list[object]):
    """The callbacks of a Trainer.

    Raises:
        ArgumentError: A callback is a class, or has none of the methods, and would never be called.
    """

    def __init__(self, callbacks: Iterable[object]) -> None:
        if not isinstance(callbacks, Iterable):
            raise ArgumentError(f"callbacks={callbacks!r:.80}: give a list of objects")
        super().__init__(callbacks)
        for callback in self:
            if isinstance(callback, type):
                raise ArgumentError(
                    f"callbacks: {callback.__name__} is a class: give an instance, {callback.__name__}()"
                )
            if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
                raise ArgumentError(f"callbacks: {callback!r:.80} has none of the methods {', '.join(HOOKS)}")

    def have(self, *hooks: str) -> bool:
        """Return True if a callback has one of these methods."""
        return any(hasattr(callback, hook) for callback in self for hook in hooks)

    def call(self, hook: str, *args: Any) -> None:
        """Call the method of each callback that has it."""
        for callback in self:
            method = getattr(callback, hook, None)
            if method is not None:
                method(*args)
