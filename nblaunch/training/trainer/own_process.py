"""The state of the notebook's own process around a training run in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from torch import nn
from torch.optim import Optimizer

from nblaunch.training.accelerator.preparation import move_state
from nblaunch.training.distribute import in_place
from nblaunch.training.precision import is_cast, plain_forward
from nblaunch.training.seeding import SEED_VARIABLE
from nblaunch.training.states.checkpoint import random_states, restore_random_states


@contextmanager
def kept_process_state(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Restore afterwards what ranks would not have changed either: all but the trained states.

    These are the random states, and the model's device, types, train and eval modes, forward and gradients.
    """
    random, seed, had_cast = random_states(), os.environ.get(SEED_VARIABLE), is_cast(model)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    places = {name: (tensor.device, tensor.dtype) for name, tensor in _tensors(model)}
    try:
        model.zero_grad()
        with in_place():
            yield
    finally:
        if not had_cast:
            plain_forward(model)
        for module, is_training in modes:
            module.training = is_training
        model.zero_grad()  # of another device or type than the parameters will have
        for name, tensor in _tensors(model):
            if name in places and places[name] != (tensor.device, tensor.dtype):
                tensor.data = tensor.data.to(*places[name])
        for parameter, gradient in gradients:
            parameter.grad = gradient
        move_state(optimizer)
        restore_random_states(random)
        os.environ.pop(SEED_VARIABLE, None)
        if seed is not None:
            os.environ[SEED_VARIABLE] = seed


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return chain(model.named_parameters(), model.named_buffers())  # type: ignore[arg-type]  # both are tensors
