"""A Trainer's callbacks: what they may be, and calls of their methods."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nblaunch.errors import ArgumentError
from nblaunch.training.pytree import tree_map

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

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks that have ``state_dict`` and ``load_state_dict``, by place and class.

        Raises:
            ArgumentError: A state holds what checkpoints cannot: they are read without running code.
        """
        states = {name: callback.state_dict() for name, callback in self._with_states().items()}
        for name, state in states.items():
            file = io.BytesIO()
            try:
                torch.save(tree_map(lambda leaf: None if isinstance(leaf, Tensor) else leaf, state), file)
                torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            except Exception as error:  # pickle's, or of a user's __reduce__
                raise ArgumentError(
                    f"callbacks: the state_dict() of {name} cannot be in a checkpoint, which holds tensors, numbers, "
                    f"strings, lists and dicts: {error!s:.300}"
                ) from error
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the states into the callbacks that stand where they stood, of the same class."""
        for name, callback in self._with_states().items():
            if name in states:
                callback.load_state_dict(states[name])

    def _with_states(self) -> dict[str, Any]:
        methods = ("state_dict", "load_state_dict")
        return {
            f"{number} {type(callback).__qualname__}": callback
            for number, callback in enumerate(self)
            if all(callable(getattr(callback, method, None)) for method in methods)
        }

    def call(self, hook: str, *args: Any) -> None:
        """Call the method of each callback that has it."""
        for callback in self:
            method = getattr(callback, hook, None)
            if method is not None:
                method(*args)
