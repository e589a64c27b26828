"""`LoadedState`: a saved state that was read, and what it changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.accelerator.gradient_accumulation import GradientState
from nblaunch.training.data.sharded_loader import restore_position
from nblaunch.training.parallel.sharded_models import drop_unshared_gradients
from nblaunch.training.parallel.sharded_states import load_full_state, parts_of
from nblaunch.training.states import model_states
from nblaunch.training.states.checkpoint import restore_random_states, seed_from_random_states
from nblaunch.training.states.gradient_order import repeat_order
from nblaunch.training.states.model_states import path_of, read_file
from nblaunch.training.states.prepared_objects import PreparedObjects, Registered
from nblaunch.training.states.state_folder import Manifest
from nblaunch.training.topology import data_world, world

RANKS, SCALER = "ranks.pt", "scaler.pt"


class LoadedState:
    """A saved state that was read and checked; nothing is changed before `apply`."""

    def __init__(
        self,
        record: PreparedObjects,
        registered: Registered,
        gradients: GradientState,
        models: list[nn.Module],
        copies: int,
        folder: Path,
        manifest: Manifest,
        load_kwargs: Mapping[str, Any],
        model_options: Mapping[str, Any],
    ) -> None:
        self.manifest, self.models, self.model_options = manifest, models, model_options
        self.record, self.registered, self.gradients, self.copies = record, registered, gradients, copies
        strict = bool(model_options.get("strict", True))
        self.weights = [model_states.read_model(*pair, strict) for pair in _numbered(models, folder)]
        self.optimizers = [
            model_states.read_optimizer(*pair, load_kwargs) for pair in _numbered(record.optimizers, folder)
        ]
        self.schedulers = [
            read_file(path_of(folder, "scheduler", number), load_kwargs)
            for number in range(len(self.record.schedulers))
        ]
        self.objects = [
            read_file(path_of(folder, "object", number), load_kwargs) for number in range(len(self.registered.objects))
        ]
        self.scaler = read_file(folder / SCALER) if SCALER in manifest.sizes else None
        self.ranks = read_file(folder / RANKS)
        self._check_semantics(folder)
        if (self.scaler is None) != (self.gradients.scaler is None) and world().rank == 0:
            which = "without" if self.scaler is None else "with"
            warn(f"load_state: {folder} was saved {which} a gradient scaler: use the same mixed_precision")
        self.saved_gradients = self._read_gradients(folder) if manifest.has_gradients else None

    def _check_semantics(self, folder: Path) -> None:
        """Refuse a state that counts samples and steps in another way.

        Raises:
            ArgumentError: Only one of the two Accelerators has accelerate's semantics.
        """
        wrote, now = (
            "accelerate" if semantics == "accelerate" else "exact"
            for semantics in (self.ranks[0].get("semantics", self.gradients.semantics), self.gradients.semantics)
        )
        if wrote != now:
            raise ArgumentError(
                f'input_dir={str(folder)!r}: it was saved with semantics="{wrote}", and this Accelerator has '
                f'semantics="{now}": the order of samples and the steps of schedules differ. Use '
                f'Accelerator(semantics="{wrote}"), or load only the weights, by torch.load from model.pt'
            )

    def _read_gradients(self, folder: Path) -> list[list[torch.Tensor | None]]:
        """Return each module's gradients: this rank's own, or with another number of ranks their mean.

        Raises:
            ArgumentError: The ranks divide a module here.
        """
        if model_states.are_divided(self.record.models):
            raise ArgumentError(
                f"input_dir={str(folder)!r}: it was saved within an optimizer step, and its gradients do not fit "
                "models that ranks divide: load it without a Parallelism, or a state that was saved after a step"
            )
        size = self.manifest.world_size
        if size == world().size:
            own: list[list[torch.Tensor | None]] = read_file(gradient_path(folder, world().rank))
            return own
        by_rank = [read_file(gradient_path(folder, rank)) for rank in range(size)]
        return [[_mean(grads) for grads in zip(*of_model, strict=True)] for of_model in zip(*by_rank, strict=True)]

    def repeat_gradient_orders(self) -> None:
        """Have DDP sum gradients in the order of the run that was saved. A collective."""
        if self.manifest.world_size == world().size:
            for model, order in zip(self.record.models, self.ranks[0]["gradient_orders"], strict=True):
                repeat_order(model, order)

    def apply(self) -> None:
        """Load everything; the random states last."""
        for model, weights in zip(self.models, self.weights, strict=True):
            model.load_state_dict(parts_of(model, weights), **self.model_options)
        for optimizer, state in zip(self.record.optimizers, self.optimizers, strict=True):
            load_full_state(optimizer, state)
        for scheduler, state in zip(self.record.schedulers, self.schedulers, strict=True):
            scheduler.load_state_dict(state)
        if self.scaler is not None and (scaler := self.gradients.scaler) is not None:
            scaler.load_state_dict(self.scaler)
        for thing, state in zip(self.registered.objects, self.objects, strict=True):
            thing.load_state_dict(state)
        own, is_known = self._own()
        self._apply_loaders(own["loaders"])
        self.gradients.resume_step(own["step"]["batches"], own["step"]["size"])
        for number, model in enumerate(self.record.models):
            _set_gradients(model, self.saved_gradients[number] if self.saved_gradients is not None else None)
        if is_known:
            restore_random_states(own["random"])
        else:
            seed_from_random_states(own["random"], data_world(self.copies).rank)

    def _own(self) -> tuple[dict[str, Any], bool]:
        """Return what was saved for this rank; rank 0's, and False, if there was no such rank.

        Ranks of one tensor group must draw the same numbers: if the groups have another size now, each is one rank.
        """
        before = self.ranks[0].get("copies", 1)
        if (len(self.ranks), before) == (world().size, self.copies):
            return self.ranks[world().rank], True
        groups, part = self.ranks[::before], data_world(self.copies).rank
        return (groups[part], True) if part < len(groups) else (groups[0], False)

    def _apply_loaders(self, positions: list[dict[str, Any]]) -> None:
        loaders = self.record.loaders
        for number, (loader, position) in enumerate(zip(loaders, positions, strict=False)):
            self.gradients.forget_pass(loader)
            restore_position(loader, number, position)
        if len(loaders) != len(positions) and world().rank == 0:
            warn(
                f"load_state: the state has the positions of {len(positions)} prepared loaders, and there are "
                f"{len(loaders)}: the first ones continue, in the order of their preparation"
            )


def gradient_path(folder: Path, rank: int) -> Path:
    """Return where a rank keeps its gradients of an unfinished optimizer step."""
    return folder / f"gradients_rank{rank}.pt"


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    """Return each parameter's gradient."""
    return [parameter.grad for parameter in model.parameters()]


def _set_gradients(model: nn.Module, gradients: list[torch.Tensor | None] | None) -> None:
    """Set each parameter's gradient; clear them without `gradients`, because none belongs to the loaded state."""
    drop_unshared_gradients(model)
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _mean(gradients: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(there).sum(0) / len(gradients) if there else None


def _numbered(things: list[Any], folder: Path) -> list[tuple[Any, Path, int]]:
    return [(thing, folder, number) for number, thing in enumerate(things)]
