"""Gradient accumulation and mixed precision, and the wrappers of optimizers and schedulers that follow them."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nblaunch.errors import ArgumentError
from nblaunch.training.parallelism import HALF, no_gradient_sync
from nblaunch.training.pytree import parameters_of, tree_map

_VARIABLE = "ACCELERATE_MIXED_PRECISION"
"""Set in the ranks by the launcher's ``mixed_precision=``, and by ``accelerate launch``."""


def precision_of(requested: str | None) -> str:
    name = requested if requested is not None else os.environ.get(_VARIABLE, "no")
    if name not in ("no", *HALF):
        raise ArgumentError(f'mixed_precision={name!r}: must be "no", "fp16" or "bf16"')
    return name


def cast_forward(module: nn.Module, device: torch.device, precision: str) -> None:
    """Run the module's forward in autocast, and return its half-precision outputs as float32.

    Patches the instance, in a way that survives pickling and deepcopy. Idempotent; `plain_forward` undoes it.
    """
    if precision == "no" or is_cast(module):
        return
    earlier = vars(module).get("forward")
    module.forward = functools.partial(_cast, module, earlier, device.type, precision)


def plain_forward(module: nn.Module) -> None:
    if not is_cast(module):
        return
    _, earlier, _, _ = vars(module)["forward"].args
    del module.forward
    if earlier is not None:
        module.forward = earlier


def is_cast(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _cast


def _cast(
    module: nn.Module, earlier: Callable[..., Any] | None, device: str, precision: str, *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(device, HALF[precision]):
        output = type(module).forward(module, *args, **kwargs) if earlier is None else earlier(*args, **kwargs)
    halves = (torch.float16, torch.bfloat16)
    return tree_map(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in halves else leaf, output)


class GradientState:
    """Which batches end an optimizer step, and the gradient scaler.

    An Accelerator shares it with the objects that it prepared.
    """

    def __init__(self, every: int, scaler: torch.amp.GradScaler | None = None) -> None:
        self.every = every  # batches per optimizer step
        self.sync = True  # whether this batch ends a step: gradients are exchanged, and optimizers step
        self._scaler = scaler
        self.unfinished = 0  # batches so far in an unfinished step
        self.divisor = every  # of losses in the current step: its batches, as far as known
        self._passes: list[weakref.ref[Any]] = []
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        """Loaders with a backward pass in the latest pass over them."""
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._skipped: set[int] = set()
        self._unscaled: set[int] = set()
        self._has_stepped = False

    def __reduce__(self) -> Any:
        return GradientState, (self.every,)  # nothing is prepared yet in the process that receives it

    # ------------------------------------------------------------------ active loaders
    def begin_batch(self, loader: Any) -> None:
        """Note that a prepared loader yields a batch. Passes inside its own are dropped until they yield again."""
        loaders = self._loaders()
        place = next((i for i, other in enumerate(loaders) if other is loader), len(loaders))
        if place == len(loaders):
            self._trained.discard(loader)  # a new pass, or another loader beside this one has yielded
        self._passes = [weakref.ref(other) for other in (*loaders[:place], loader)]

    def end_pass(self, loader: Any) -> None:
        self._passes = [reference for reference in self._passes if reference() is not loader]

    def _loaders(self) -> list[Any]:
        return [loader for loader in (reference() for reference in self._passes) if loader is not None]

    @property
    def is_padding(self) -> bool:
        return any(loader.is_padding for loader in self._loaders()[-1:])

    def continues(self, loader: Any) -> bool:
        """Return True if a resumed run continues the latest pass over `loader` instead of beginning it again.

        A pass in progress is continued. One that was broken off is continued if the user trained in it: a loop over
        validation data, or a peek, begins again.
        """
        return loader in self._trained or any(loader is other for other in self._loaders())

    # ------------------------------------------------------------------ accumulation
    @contextmanager
    def accumulate(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        latest = self._loaders()[-1:]
        if self.unfinished == 0:
            left = latest[0].remaining if latest else None
            self.divisor = left if left is not None and 0 < left < self.every else self.every
        self.unfinished += 1
        self.sync = any(loader.is_last for loader in latest) or self.unfinished >= self.divisor
        if self.sync:
            self.unfinished = 0
        with ExitStack() as stack:
            for module in () if self.sync else list(modules) or list(self.modules):
                stack.enter_context(no_gradient_sync(module))
            yield

    def begin_step(self) -> None:
        self.unfinished, self.divisor, self.sync, self._has_stepped = 0, self.every, True, False
        self._unscaled.clear()
        self._skipped.clear()

    # ------------------------------------------------------------------ the scaler
    @property
    def needs_wrappers(self) -> bool:
        return self.every > 1 or self._scaler is not None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of float16, else None.

        It is updated on its next use, not after each optimizer's step: all optimizers of one step unscale by the same
        scale.
        """
        if self._scaler is not None and (self._has_stepped or self._unscaled):
            self._scaler.update()
            self._has_stepped = False
            self._unscaled.clear()
        return self._scaler

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self._trained.update(self._loaders())
        share = loss / self.divisor if self.divisor > 1 else loss
        scaler = self.scaler
        (share if scaler is None else scaler.scale(share)).backward(**kwargs)

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Unscale the gradients of each optimizer that has any of the parameters, once per step."""
        if self._scaler is None:
            return
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self.optimizers:
            if id(optimizer) not in self._unscaled and not wanted.isdisjoint(map(id, parameters_of(optimizer))):
                self._scaler.unscale_(optimizer)
                self._unscaled.add(id(optimizer))

    # ------------------------------------------------------------------ optimizers and schedulers
    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        if not self.sync:
            return None
        given = () if closure is None else (closure,)
        if self._scaler is None:
            return optimizer.step(*given)
        result = self._scaler.step(optimizer, *given)
        self._has_stepped = True
        self._skipped.discard(id(optimizer))
        if any(found.item() for found in self._scaler._found_inf_per_device(optimizer).values()):
            self._skipped.add(id(optimizer))
        return result

    def has_stepped(self, optimizer: Any) -> bool:
        """Return True if the optimizer made a real step with this batch: infinite gradients make it skip one."""
        inner = optimizer.inner if isinstance(optimizer, SteppedOptimizer) else optimizer
        return self.sync and id(inner) not in self._skipped


class _Stepped:
    inner: Any

    def __init__(self, inner: Any, gradient_state: GradientState) -> None:
        self.inner = inner  # not torch's __init__, which would build new parameter groups, or reset the learning rate
        self.gradient_state = gradient_state

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)  # during unpickling there is no inner object yet
        return getattr(self.inner, name)

    def __reduce__(self) -> Any:
        return type(self), (self.inner, self.gradient_state)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class SteppedOptimizer(_Stepped, Optimizer):
    """Wraps an optimizer: ``step`` and ``zero_grad`` act only when a step is complete."""

    inner: Optimizer

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return self.gradient_state.step(self.inner, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.gradient_state.sync:
            self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)


class SteppedScheduler(_Stepped, LRScheduler):
    """Wraps a learning-rate scheduler: it advances only with a real step of its optimizer."""

    inner: LRScheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.gradient_state.has_stepped(self.inner.optimizer):
            self.inner.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        return self.inner.get_last_lr()
