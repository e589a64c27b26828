"""The objects that an Accelerator prepared in this process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError
from nblaunch.training.pytree import tree_leaves
from nblaunch.training.wrappers import SteppedOptimizer, SteppedScheduler, unwrapped

_KINDS = (nn.Module, Optimizer, LRScheduler, DataLoader)
_NEEDED = {nn.Module: "modules", Optimizer: "optimizers", LRScheduler: "schedulers"}


class PreparedObjects:
    """The prepared objects that still exist, each once, in the order of their preparation.

    A cell that is run again prepares new objects: the earlier ones must not be kept alive, nor be saved.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._seen: set[type] = set()
        """Those of `_NEEDED` that were prepared."""
        self._is_settled = True
        """Whether no object can have taken the place of an earlier one since `collect`."""

    def __reduce__(self) -> Any:
        return PreparedObjects, ()  # nothing is prepared yet in the process that receives it

    def add(self, objects: Any) -> None:
        """Note the objects of a pytree. Of a wrapper its inner object, which lives as long as the user has either."""
        before = [kind for kind in _KINDS if self._of(kind)]
        for leaf in tree_leaves(objects):
            if isinstance(leaf, nn.Module):
                self._add(unwrapped(leaf))
            elif isinstance(leaf, (SteppedOptimizer, SteppedScheduler)):
                self._add(leaf.inner)
            elif isinstance(leaf, _KINDS):
                self._add(leaf)
            if isinstance(leaf, tuple(before)):
                self._is_settled = False

    def _add(self, thing: Any) -> None:
        if any(reference() is thing for reference in self._references):
            return
        self._references.append(weakref.ref(thing))
        self._seen |= {kind for kind in _NEEDED if isinstance(thing, kind)}

    def collect(self) -> None:
        """Drop objects that only reference cycles keep alive, if others may have taken their place."""
        if not self._is_settled:
            gc.collect()  # 0.1 s and more in a process with torch
            self._is_settled = True
        self._references = [reference for reference in self._references if reference() is not None]

    def check_any_left(self) -> None:
        """Refuse a state without what was trained.

        Raises:
            ArgumentError: All prepared objects of a kind are gone.
        """
        for kind, name in _NEEDED.items():
            if kind in self._seen and not self._of(kind):
                raise ArgumentError(
                    f"the prepared {name} no longer exist: keep a reference to them until save_state or load_state"
                )

    def _of(self, kind: type) -> list[Any]:
        return [thing for thing in (reference() for reference in self._references) if isinstance(thing, kind)]

    @property
    def models(self) -> list[nn.Module]:
        """The users' own modules."""
        return self._of(nn.Module)

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._of(Optimizer)

    @property
    def schedulers(self) -> list[LRScheduler]:
        return self._of(LRScheduler)

    @property
    def loaders(self) -> list[Any]:
        return self._of(DataLoader)
