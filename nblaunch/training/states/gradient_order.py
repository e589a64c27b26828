"""The order in which DistributedDataParallel sums gradients, which a resumed run must repeat.

In its first backward pass DDP notes in which order gradients become ready, and groups them in that order from the next
step on. With three ranks and more the groups change the order of summation, and so the last bits of the gradients.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from nblaunch.training.topology import world

_MIN_RANKS = 3
"""Two numbers have one order of summation."""
_orders: weakref.WeakKeyDictionary[nn.Module, GradientOrder] = weakref.WeakKeyDictionary()


class GradientOrder:
    """Notes the order of a module's first backward pass that exchanges gradients."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.ready: list[int] = []
        """The parameters' indices among the trainable ones."""
        self._module = weakref.ref(module)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))
            for number, parameter in enumerate(trainable(module))
        ]

    def _hook(self, number: int) -> Any:
        def note(parameter: Tensor) -> None:
            module = self._module()
            if module is not None and module.require_backward_grad_sync and number not in self.ready:
                self.ready.append(number)
                if len(self.ready) == len(self._handles):
                    self._end()

        return note

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def is_of(self, module: DistributedDataParallel) -> bool:
        """Return True if the order is this wrapper's."""
        return self._module() is module

    @property
    def is_complete(self) -> bool:
        """Return True if all gradients have become ready."""
        return len(self.ready) == len(self._handles)

    def repeat(self, order: list[int]) -> None:
        """Have a fresh module note this order, by a backward pass of zeros. A collective."""
        module = self._module()
        if module is None or self.is_complete or len(order) != len(self._handles):
            return
        parameters = trainable(module)
        kinds = (nn.Embedding, nn.EmbeddingBag)
        sparse = [inner.weight for inner in module.modules() if isinstance(inner, kinds) and inner.sparse]
        loss = torch.zeros((), device=parameters[0].device)
        for number in reversed(order):  # what is added last is ready first
            parameter = parameters[number]
            if any(parameter is weight for weight in sparse):
                first = functional.embedding(
                    torch.zeros(1, dtype=torch.long, device=loss.device), parameter, sparse=True
                )
            else:
                first = parameter.reshape(-1)[:1]
            loss = loss + first.abs().float().sum() * 0
        inner: Any = module
        inner._run_ddp_forward = lambda *args, **kwargs: loss
        try:
            module.forward().backward()
            for parameter in parameters:
                parameter.grad = None
            with module.no_sync():
                module.forward()  # regroups now: a view of the groups would take in gradients that are loaded later
        finally:
            del inner._run_ddp_forward


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that DDP exchanges gradients of."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def follow(module: DistributedDataParallel) -> None:
    """Note the order of this module's gradients, if it matters."""
    if world().size < _MIN_RANKS or module.find_unused_parameters or module.static_graph:
        return  # with unused parameters DDP does not regroup; the first pass of a static graph must be a real one
    found = _orders.get(module.module)
    if found is None or not found.is_of(module):  # a cell that is run again wraps the same module again
        _orders[module.module] = GradientOrder(module)


def order_of(model: nn.Module) -> list[int] | None:
    """Return the order of a user's own module; None if it has none yet, or it does not matter."""
    found = _orders.get(model)
    return found.ready if found is not None and found.is_complete else None


def repeat_order(model: nn.Module, order: list[int] | None) -> None:
    """Have DDP sum this module's gradients in the order of the run that is resumed. A collective."""
    found = _orders.get(model)
    if found is not None and order is not None:
        found.repeat(order)
