"""Gradient accumulation: which batches end an optimizer step, the gradient scaler, and optimizers that obey both."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.accelerator.plugin_settings import AccumulationSettings, Semantics
from nblaunch.training.collectives import share_generators
from nblaunch.training.parallel.sharded_models import no_gradient_sync
from nblaunch.training.pytree import parameters_of
from nblaunch.training.topology import data_world, world


class GradientState:
    """State that an Accelerator shares with the objects it prepared.

    Attributes:
        settings: How gradients accumulate.
        sync: Whether this batch ends a step: gradients are exchanged, and optimizers step.
        semantics: Which semantics apply.
        rng_types: The global generators that take rank 0's state with the first batch of each pass.
    """

    def __init__(
        self,
        settings: AccumulationSettings,
        scaler: torch.amp.GradScaler | None = None,
        semantics: Semantics = "own",
        rng_types: tuple[str, ...] = (),
    ) -> None:
        self.settings = settings
        self.sync = True
        self.semantics = semantics
        self.rng_types = rng_types
        self._scaler = scaler
        self._batches = 0
        self._size = settings.num_steps
        self._passes: list[weakref.ref[Any]] = []
        self._beside: weakref.WeakSet[Any] = weakref.WeakSet()
        """Loaders that continued after an outer loader had advanced: they are iterated side by side, as in ``zip``."""
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        """Loaders with a backward pass in the present pass over them."""
        self._untrained: weakref.WeakSet[Any] = weakref.WeakSet()
        """Loaders without one in their latest pass, which has ended."""
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._plain: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._skipped: set[int] = set()
        self._unscaled: set[int] = set()
        self._has_stepped = False

    def __reduce__(self) -> Any:
        return GradientState, (self.settings, None, self.semantics)  # nothing is prepared there yet

    @property
    def every(self) -> int:
        """Batches per optimizer step."""
        return self.settings.num_steps

    def set_steps(self, steps: int) -> None:
        """Change the number of batches per optimizer step.

        Raises:
            ArgumentError: Optimizers were prepared that step with every batch.
        """
        if steps > 1 and self._plain:
            raise ArgumentError(
                f"gradient_accumulation_steps={steps}: an optimizer was prepared that steps with each batch: set it "
                f"before prepare, or in the constructor: Accelerator(gradient_accumulation_steps={steps})"
            )
        self.settings = dataclasses.replace(self.settings, num_steps=steps)
        if self._batches == 0:
            self._size = steps

    def forget(self) -> None:
        """Forget what was prepared, and the batches of a step that is unfinished."""
        self._passes, self._batches, self._size, self.sync = [], 0, self.every, True
        self._beside.clear()
        self._modules.clear()
        self._plain.clear()
        self._optimizers = []

    # ------------------------------------------------------------------ active loaders
    def begin_batch(self, loader: Any) -> None:
        """Note that a prepared loader yields a batch. Passes inside its own are dropped until they yield again."""
        loaders = self._loaders()
        place = next((i for i, other in enumerate(loaders) if other is loader), len(loaders))
        if place == len(loaders) and loader not in self._beside:
            share_generators(self.rng_types)
        self._beside.update(loaders[place + 1 :])
        self._passes = [weakref.ref(other) for other in (*loaders[:place], loader)]

    def end_pass(self, loader: Any) -> None:
        """Note that a pass over `loader` was completed or abandoned."""
        self._passes = [reference for reference in self._passes if reference() is not loader]
        self._beside.discard(loader)
        (self._untrained.discard if loader in self._trained else self._untrained.add)(loader)
        self._trained.discard(loader)

    def _loaders(self) -> list[Any]:
        """Return the prepared loaders being iterated, innermost last."""
        return [loader for loader in (reference() for reference in self._passes) if loader is not None]

    @property
    def is_padding(self) -> bool:
        """Return True if the innermost loader's batch repeats another rank's."""
        return bool(getattr(self.active_dataloader, "is_padding", False))

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is being iterated, or None. The name is accelerate's, as those below."""
        return next(reversed(self._loaders()), None)

    @property
    def in_dataloader(self) -> bool:
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the innermost loader's batch is its last."""
        return bool(getattr(self.active_dataloader, "is_last", False))

    @property
    def remainder(self) -> int:
        """How many samples the innermost loader's last batches have on all ranks together, 0 for whole ones.

        -1 if that is unknown, or outside of loaders.
        """
        return int(getattr(self.active_dataloader, "remainder", -1))

    @property
    def kept_rows(self) -> int | None:
        """How many gathered rows are no repetition as accelerate counts them; None for all."""
        is_short = self.semantics == "accelerate" and self.end_of_dataloader and self.remainder > 0
        return self.remainder if is_short else None

    @property
    def sync_gradients(self) -> bool:
        return self.sync

    @property
    def num_steps(self) -> int:
        return self.every

    @property
    def sync_with_dataloader(self) -> bool:
        return self.settings.sync_with_dataloader

    def continues(self, loader: Any) -> bool:
        """Return True if a resumed run continues the latest pass over `loader` instead of beginning it again.

        A pass in progress is continued. One that was broken off is continued if the user trained in it: a loop over
        validation data, or a peek, begins again.
        """
        return loader not in self._untrained or any(loader is other for other in self._loaders())

    def forget_pass(self, loader: Any) -> None:
        """Forget how the latest pass ended: another position was loaded."""
        self._untrained.discard(loader)

    # ------------------------------------------------------------------ accumulation
    @property
    def divisor(self) -> int:
        """The number that `backward` divides the losses of the current step by: its batches, as far as known."""
        return self._size

    @contextmanager
    def accumulate(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Count one batch; a step ends with its last batch, and with a loader's last."""
        loaders = self._loaders()
        if self._batches == 0:
            # With several loaders, it is unknown whether they are iterated side by side or nested.
            left: Any = loaders[0].remaining if len(loaders) == 1 and self.sync_with_dataloader else None
            is_short = left is not None and 0 < left < self.every
            self._size = int(left) if is_short and self.semantics != "accelerate" else self.every
            if is_short and self.semantics == "moved" and world().rank == 0:
                warn(
                    f"the last optimizer step of this pass has {left} of {self.every} batches, and its loss is "
                    f"divided by {left}, where accelerate divides by {self.every}. Use "
                    'Accelerator(semantics="exact") to accept this, or semantics="accelerate" to do as it does',
                    once="short step",
                )
        self._batches += 1
        # In nested loops the outer loader's last batch stays for the whole pass over the inner one.
        are_nested = self.semantics == "accelerate" or not any(loader in self._beside for loader in loaders[-1:])
        ends = any(loader.is_last for loader in (loaders[-1:] if are_nested else loaders))
        self.sync = (ends and self.sync_with_dataloader) or self._batches >= self._size
        if self.sync:
            self._batches = 0
        with ExitStack() as stack:
            if not self.sync and not self.settings.sync_each_batch:
                self.enter_no_sync(stack, modules)
            yield

    @property
    def step_progress(self) -> tuple[int, int]:
        """The batches so far in an unfinished optimizer step (0: there is none), and the batches of that step."""
        return self._batches, self._size

    def resume_step(self, batches: int, size: int) -> None:
        """Continue a step that had this `step_progress`."""
        self._batches, self._size, self.sync = batches, size, batches == 0
        self._has_stepped = False
        self._unscaled.clear()
        self._skipped.clear()

    def enter_no_sync(self, stack: ExitStack, modules: Iterable[nn.Module]) -> None:
        """Enter ``no_sync`` of the modules (default: of all prepared ones) on `stack`."""
        for module in list(modules) or list(self._modules):
            stack.enter_context(no_gradient_sync(module))

    def add_module(self, module: nn.Module) -> None:
        self._modules.add(module)

    # ------------------------------------------------------------------ the scaler
    @property
    def needs_wrappers(self) -> bool:
        """Return True if optimizers and schedulers may not act on every ``step`` call."""
        return self.semantics != "own" or self.every > 1 or self._scaler is not None

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
        """``loss.backward``, divided by the number of batches in the step, and scaled."""
        self._trained.update(self._loaders())
        share = loss / self._size if self._size > 1 else loss
        scaler = self.scaler
        (share if scaler is None else scaler.scale(share)).backward(**kwargs)

    def unscale(self, parameters: Iterable[Tensor] | None) -> None:
        """Unscale the gradients of each optimizer that has any of the parameters (None: of all), once per step."""
        if self._scaler is None:
            return
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        for optimizer in (reference() for reference in self._optimizers):
            if optimizer is None or id(optimizer) in self._unscaled:
                continue
            if wanted is None or not wanted.isdisjoint(map(id, parameters_of(optimizer))):
                self._scaler.unscale_(optimizer)
                self._unscaled.add(id(optimizer))

    # ------------------------------------------------------------------ optimizers and schedulers
    def add_plain(self, optimizer: Optimizer) -> None:
        """Note an optimizer that is not wrapped: it steps with each batch."""
        self._plain.add(optimizer)
        optimizer.step_was_skipped = False  # type: ignore[attr-defined]  # which loops for accelerate read

    def add_optimizer(self, optimizer: Optimizer) -> None:
        if all(reference() is not optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """Step the optimizer if this batch ends a step."""
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
        """Return True if the optimizer made a real step with this batch."""
        return self.sync and not self.has_skipped(optimizer)

    def has_skipped(self, optimizer: Any = None) -> bool:
        """Return True if infinite gradients made the optimizer (default: any) skip its last step."""
        if optimizer is None:
            return bool(self._skipped)
        return id(optimizer.inner if isinstance(optimizer, SteppedOptimizer) else optimizer) in self._skipped


class SteppedOptimizer(Optimizer):
    """Wraps an optimizer: ``step`` and ``zero_grad`` act only when a step is complete.

    Attributes:
        inner: The wrapped optimizer.
    """

    def __init__(self, inner: Optimizer, gradient_state: GradientState) -> None:
        self.inner = inner  # not Optimizer.__init__, which would build new parameter groups
        self.gradient_state = gradient_state

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, name)

    def __reduce__(self) -> Any:
        return SteppedOptimizer, (self.inner, self.gradient_state)

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer, under accelerate's name."""
        return self.inner

    @property
    def step_was_skipped(self) -> bool:
        """Whether infinite gradients made it skip its last step."""
        return self.gradient_state.has_skipped(self.inner)

    def __repr__(self) -> str:
        return f"SteppedOptimizer({self.inner!r})"

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return self.gradient_state.step(self.inner, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.gradient_state.sync:
            self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)


class SteppedScheduler(LRScheduler):
    """Wraps a learning-rate scheduler: it advances only with a real step of its optimizer.

    Attributes:
        inner: The wrapped scheduler.
        per_rank: Whether it advances by the number of ranks, as accelerate's ``AcceleratedScheduler`` does.
        copies: Ranks that count as one then, because they compute on the same samples.
    """

    def __init__(
        self, inner: LRScheduler, gradient_state: GradientState, per_rank: bool = False, copies: int = 1
    ) -> None:
        self.inner = inner  # not LRScheduler.__init__, which would reset the learning rate
        self.gradient_state = gradient_state
        self.per_rank = per_rank
        self.copies = copies

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, name)

    def __reduce__(self) -> Any:
        return SteppedScheduler, (self.inner, self.gradient_state, self.per_rank, self.copies)

    @property
    def scheduler(self) -> LRScheduler:
        """The wrapped scheduler, under accelerate's name."""
        return self.inner

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.gradient_state.has_stepped(self.inner.optimizer):
            return
        inner: Any = self.inner
        for _ in range(data_world(self.copies).size if self.per_rank else 1):
            # Like accelerate: OneCycleLR raises beyond its last step.
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


def _inner_attribute(wrapper: Any, name: str) -> Any:
    if name == "inner" or name.startswith("__"):
        raise AttributeError(name)  # during unpickling there is no inner object yet
    return getattr(wrapper.inner, name)
