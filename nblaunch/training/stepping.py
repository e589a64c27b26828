"""When a step is a real one: gradient accumulation, the gradient scaler, and who must know of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nblaunch.training.world import world


class Stepping:
    """What an Accelerator's prepared objects share while they train.

    Attributes:
        every: Batches for one optimizer step.
        sync: Whether this batch ends a step: gradients are exchanged, and optimizers step.
    """

    def __init__(self, every: int = 1, scaler: torch.amp.GradScaler | None = None) -> None:
        self.every = every
        self.sync = True
        self._scaler = scaler
        self._batches = 0
        self._size = every
        self._passes: list[weakref.ref[Any]] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._skipped: set[int] = set()
        self._unscaled: set[int] = set()
        self._has_stepped = False

    def __reduce__(self) -> Any:
        return Stepping, (self.every,)  # where it is sent, nothing is prepared yet

    # ------------------------------------------------------------------ which loader is being iterated
    def given(self, loader: Any) -> None:
        """A prepared loader is about to give out a batch: passes that began within its own are over."""
        place = next((i for i, one in enumerate(self._passes) if one() is loader), len(self._passes))
        self._passes[place:] = [weakref.ref(loader)]

    def ended(self, loader: Any) -> None:
        """A pass over it was taken to its end or broken off."""
        self._passes = [one for one in self._passes if one() is not loader]

    def _loaders(self) -> list[Any]:
        """The prepared loaders that are being iterated, the innermost last."""
        return [loader for loader in (one() for one in self._passes) if loader is not None]

    @property
    def is_padding(self) -> bool:
        """Whether the innermost loader's batch repeats another rank's."""
        return any(loader.is_padding for loader in self._loaders()[-1:])

    # ------------------------------------------------------------------ accumulation
    @contextmanager
    def accumulate(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """One batch of a step's, or the last of its loader."""
        loaders = self._loaders()
        if self._batches == 0:
            self._size = self._size_of_step(loaders)
        self._batches += 1
        self.sync = any(loader.is_last for loader in loaders) or self._batches == self._size
        if self.sync:
            self._batches = 0
        with ExitStack() as stack:
            if not self.sync:
                self.hold_back(stack, modules)
            yield

    def _size_of_step(self, loaders: list[Any]) -> int:
        """How many batches the step will have that begins now: `every`, or what is left of the pass.

        Of several loaders at once nobody knows whether they are taken side by side or one within another.
        """
        left = loaders[0].remaining if len(loaders) == 1 else None
        return self.every if left is None else max(1, min(self.every, left))

    def hold_back(self, stack: ExitStack, modules: Iterable[nn.Module]) -> None:
        """Let the modules, or else all that were prepared, exchange no gradients within the stack."""
        for module in list(modules) or list(self._modules):
            no_sync = getattr(module, "no_sync", None)  # DDP's own, FSDP's, and a compiled one's
            if no_sync is not None:
                stack.enter_context(no_sync())

    def note_module(self, module: nn.Module) -> None:
        self._modules.add(module)

    # ------------------------------------------------------------------ the scaler
    @property
    def needs_wraps(self) -> bool:
        """Whether optimizers and schedulers must ask here before they step."""
        return self.every > 1 or self._scaler is not None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; float16 alone has one.

        It is updated when it is next used, not with each optimizer's step: so all optimizers of one step unscale by
        the same scale.
        """
        if self._scaler is not None and (self._has_stepped or self._unscaled):
            self._scaler.update()
            self._has_stepped = False
            self._unscaled.clear()
        return self._scaler

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward``, divided by the batches of its step, and scaled."""
        share = loss / self._size if self._size > 1 else loss
        scaler = self.scaler
        (share if scaler is None else scaler.scale(share)).backward(**kwargs)

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Bring gradients to their real size, once a step: those of each optimizer that has any of the parameters."""
        if self._scaler is None:
            return
        asked = {id(parameter) for parameter in parameters}
        for optimizer in (reference() for reference in self._optimizers):
            if optimizer is None or id(optimizer) in self._unscaled:
                continue
            if any(id(parameter) in asked for group in optimizer.param_groups for parameter in group["params"]):
                self._scaler.unscale_(optimizer)
                self._unscaled.add(id(optimizer))

    # ------------------------------------------------------------------ optimizers and schedules
    def note_optimizer(self, optimizer: Optimizer) -> None:
        if all(reference() is not optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """The optimizer's step, if this batch ends one."""
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
        """Whether the optimizer made a real step with this batch."""
        return self.sync and not self.has_skipped(optimizer)

    def has_skipped(self, optimizer: Any = None) -> bool:
        """Whether infinite gradients kept the optimizer (default: any) from its last step."""
        return bool(self._skipped) if optimizer is None else id(bare(optimizer)) in self._skipped


class SteppedOptimizer(Optimizer):
    """An optimizer that steps, and forgets gradients, only when a step is complete; in all else it is the one inside.

    Attributes:
        inner: That one.
    """

    def __init__(self, inner: Optimizer, stepping: Stepping) -> None:
        self.inner = inner  # Optimizer.__init__ would gather the parameters anew
        self.stepping = stepping

    def __getattr__(self, name: str) -> Any:
        return _of_inner(self, name)

    def __reduce__(self) -> Any:
        return SteppedOptimizer, (self.inner, self.stepping)

    def __repr__(self) -> str:
        return f"SteppedOptimizer({self.inner!r})"

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return self.stepping.step(self.inner, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.stepping.sync:
            self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)


class SteppedScheduler(LRScheduler):
    """A schedule that advances only with a real step of its optimizer; in all else it is the one inside.

    Attributes:
        inner: That one.
        per_rank: Whether it then takes as many steps as there are ranks, as accelerate's ``AcceleratedScheduler``.
    """

    def __init__(self, inner: LRScheduler, stepping: Stepping, per_rank: bool = False) -> None:
        self.inner = inner  # LRScheduler.__init__ would set the learning rate back
        self.stepping = stepping
        self.per_rank = per_rank

    def __getattr__(self, name: str) -> Any:
        return _of_inner(self, name)

    def __reduce__(self) -> Any:
        return SteppedScheduler, (self.inner, self.stepping, self.per_rank)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.stepping.has_stepped(self.inner.optimizer):
            return
        inner: Any = self.inner
        for _ in range(world().size if self.per_rank else 1):
            # as accelerate, where OneCycleLR would raise beyond its last step
            if not self.per_rank or inner._step_count <= getattr(inner, "total_steps", math.inf):
                inner.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        return self.inner.get_last_lr()

    def get_lr(self) -> list[Any]:
        return self.inner.get_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def bare(optimizer: Any) -> Any:
    """The optimizer itself, without what `prepare` put around it."""
    return optimizer.inner if isinstance(optimizer, SteppedOptimizer) else optimizer


def _of_inner(wrap: Any, name: str) -> Any:
    if name == "inner" or name.startswith("__"):
        raise AttributeError(name)  # it is being rebuilt, and has no inner yet
    return getattr(wrap.inner, name)
