"""`StateFiles`: an Accelerator's saved states, to resume a user's own loop exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from nblaunch.errors import ArgumentError, warn
from nblaunch.machine.argument_checks import whole_number
from nblaunch.training.accelerator.rank_roles import RankRoles
from nblaunch.training.data.sharded_loader import position_of, skip_first_batches
from nblaunch.training.exchange import exchange, exchange_results
from nblaunch.training.states import gradient_order, model_states, state_folder
from nblaunch.training.states.checkpoint import random_states
from nblaunch.training.states.loaded_state import RANKS, SCALER, LoadedState, gradient_path, gradients_of
from nblaunch.training.states.model_states import path_of
from nblaunch.training.states.prepared_objects import HookHandle, PreparedObjects, Registered
from nblaunch.training.states.state_folder import Manifest, StateFolder
from nblaunch.training.topology import world

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]


class StateFiles(RankRoles):
    """The part of an `Accelerator` that saves and loads the state of everything it prepared."""

    # ------------------------------------------------------------------ saving
    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Save the state of everything that was prepared, to resume exactly. A collective.

        It holds the prepared modules, optimizers, schedulers and the gradient scaler; the random states of each rank
        (Python's, NumPy's, torch's); the positions of prepared loaders; the gradients of an unfinished optimizer step
        of `accumulate`; and registered objects. Prepared objects that no longer exist are left out.

        The folder is written beside its place and moved there when it is complete: a crash, Stop or a full disk leaves
        the earlier one. Rank 0 writes; ranks on other machines must see the same folder. One process without a process
        group reads each file by ``torch.load`` (without a GPU: ``map_location="cpu"``): ``model.pt``, ``model_1.pt``
        ... are the ``state_dict`` of the users' own modules. Where ranks divide models (`parallelism`), their whole
        states are gathered on rank 0, which needs CPU memory for them.

        Save between optimizer steps, or after any batch within `accumulate`. Gradients that a loop accumulates without
        `accumulate` are not saved; if ranks divide a model, save between steps only.

        Args:
            output_dir: The folder. A state that is there is replaced. With ``automatic_checkpoint_naming`` it is
                ignored, as in accelerate: the folder is ``project_dir/checkpoints/checkpoint_<iteration>``.
            safe_serialization: Accepted as in accelerate: the files need no code to load either way.
            save_model_func_kwargs: Not supported.

        Returns:
            The folder.

        Raises:
            ArgumentError: There is no `output_dir`, or it holds files that are not of a saved state. Or ranks divide a
                model, and an optimizer step is unfinished.
            OSError: On every rank, if one cannot write.
        """
        self._join()
        if save_model_func_kwargs:
            raise ArgumentError(f"save_state: {', '.join(save_model_func_kwargs)}: not supported, leave it out")
        self._prepared.collect()
        configuration = self._automatic_naming()
        parts = exchange_results(lambda: (self._target(output_dir), self._kinds(), self._own_state()))
        target, kinds, _ = parts[0]
        if any(other != target for other, *_ in parts):
            raise ArgumentError("output_dir: the ranks passed different folders: give the same on every rank")
        if any(other != kinds for _, other, _ in parts):
            raise ArgumentError("save_state: the ranks prepared or registered different objects: use the same on each")
        is_writer = world().rank == 0
        folder = exchange_results(lambda: StateFolder.begin(target) if is_writer else None)[0]
        assert folder is not None
        try:
            weights = [model_states.whole_state(model) for model in self._prepared.models]
            optimizers = [model_states.optimizer_state(optimizer) for optimizer in self._prepared.optimizers]
            by_rank = [own for *_, own in parts]
            exchange_results(lambda: self._write(folder.scratch, weights, optimizers, by_rank))
            size, has_gradients = world().size, self._gradients.step_progress[0] > 0
            exchange_results(lambda: folder.complete(size, kinds, has_gradients) if is_writer else None)
        finally:
            if is_writer:
                folder.discard()
        if configuration is not None:
            keep = configuration.total_limit
            exchange_results(lambda: state_folder.remove_surplus(target.parent, keep) if is_writer and keep else None)
            configuration.iteration += 1
        return target

    def _target(self, output_dir: str | Path | None) -> Path:
        configuration = self._automatic_naming()
        if configuration is None:
            if output_dir is None:
                raise ArgumentError(
                    "output_dir=None: give a folder, or an Accelerator with a project_dir and a project_config with "
                    "automatic_checkpoint_naming=True"
                )
            return Path(output_dir).expanduser().resolve()  # a link to a folder stays
        target = state_folder.numbered(self._checkpoints(), configuration.iteration)
        if target.exists():
            raise ArgumentError(
                f"{target} exists: load_state() to continue after the latest one, set project_config.iteration to the "
                "number to continue with, or use another project_dir"
            )
        return target

    def _automatic_naming(self) -> Any:
        """Return the project's configuration if it names the folders, else None."""
        configuration = self.project_configuration
        if not getattr(configuration, "automatic_checkpoint_naming", False):
            return None
        if getattr(configuration, "save_on_each_node", False):
            raise ArgumentError("save_on_each_node=True: a saved state is one folder that all machines see")
        if self.project_dir is None and configuration.project_dir is None:
            raise ArgumentError("project_dir=None: automatic_checkpoint_naming needs an Accelerator(project_dir=...)")
        if configuration.total_limit is not None:
            whole_number("total_limit", configuration.total_limit, least=1)
        return configuration

    def _checkpoints(self) -> Path:
        place = self.project_dir or self.project_configuration.project_dir
        return Path(place).expanduser().resolve() / "checkpoints"

    def _own_state(self) -> dict[str, Any]:
        """Return what differs between ranks."""
        self._prepared.check_any_left()
        batches, size = self._gradients.step_progress
        if batches and model_states.are_divided(self._prepared.models):
            raise ArgumentError(
                f"save_state: {batches} of {size} batches of an optimizer step are done, and the gradients of divided "
                "models cannot be saved: save when accelerator.sync_gradients is True"
            )
        return {
            "copies": self.copies,
            "semantics": self.semantics,
            "random": random_states(),
            "loaders": [position_of(loader, self._gradients.continues(loader)) for loader in self._prepared.loaders],
            "step": {"batches": batches, "size": size},
            "gradient_orders": [gradient_order.order_of(model) for model in self._prepared.models],
        }

    def _kinds(self) -> dict[str, list[str]]:
        record = self._prepared
        kinds: dict[str, list[Any]] = {
            "model": [*record.models],
            "optimizer": [*record.optimizers],
            "scheduler": [*record.schedulers],
            "object": self._registered.objects,
        }
        return {kind: [type(thing).__name__ for thing in things] for kind, things in kinds.items()}

    def _write(
        self,
        folder: Path,
        weights: list[dict[str, Any]],
        optimizers: list[dict[str, Any]],
        by_rank: list[dict[str, Any]],
    ) -> None:
        """Write the files, on rank 0, and on every rank its gradients."""
        record, registered, scaler = self._prepared, self._registered, self._gradients.scaler
        for hook in list(registered.save_hooks.values()):
            hook(record.models, weights, str(folder))
        if self._gradients.step_progress[0]:
            gradients = [gradients_of(model) for model in record.models]
            model_states.write_file(gradients, gradient_path(folder, world().rank))
        if world().rank != 0:
            return
        for number, state in enumerate(weights):
            model_states.write_file(state, path_of(folder, "model", number))
        for number, state in enumerate(optimizers):
            model_states.write_file(state, path_of(folder, "optimizer", number))
        for number, scheduler in enumerate(record.schedulers):
            model_states.write_file(scheduler.state_dict(), path_of(folder, "scheduler", number))
        if scaler is not None:
            model_states.write_file(scaler.state_dict(), folder / SCALER)
        model_states.write_file(by_rank, folder / RANKS)
        for number, thing in enumerate(registered.objects):
            model_states.write_file(thing.state_dict(), path_of(folder, "object", number))
        _warn_about_code(folder)

    # ------------------------------------------------------------------ loading
    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore a state that `save_state` wrote. A collective.

        Prepare the same objects in the same order first, and register the same objects. Everything is checked before
        anything changes.

        Break off a loop over a prepared loader before you load: a pass in progress does not move. Prepared loaders
        continue at their batch: the next pass yields those that were left. (In accelerate's semantics only loaders of
        ``use_stateful_dataloader`` do.) `skip_first_batches` with a script's own count does not skip twice, see there.

        On the CPU a run that continues reaches bit-equal weights, with the same number of ranks. (An exception is DDP's
        ``static_graph`` with three ranks or more.) With another number the remaining samples are divided again, if
        `ShardedLoader` can; ranks that did not exist get random states derived from rank 0's. Ranks may divide the
        models in another way than those that saved, or not at all. Gradients of an unfinished step are averaged over
        the ranks that saved them; if there are none in the state, the modules' gradients are cleared.

        Args:
            input_dir: The folder. Default, with ``automatic_checkpoint_naming``: the latest of the project. Saving
                then continues with the number after the latest.
            load_kwargs: Arguments for ``torch.load`` of optimizers, schedulers and registered objects. Files are read
                with ``weights_only=True``, which runs no code; ``{"weights_only": False}`` is for registered objects
                whose state holds other types, from a folder that you trust.
            load_model_func_kwargs: Arguments for the modules' ``load_state_dict``, such as ``strict=False``.

        Raises:
            ArgumentError: On every rank: there is no such folder; it is incomplete, damaged or accelerate's; or it is
                of another model, other objects or other `semantics`. The message says which.
        """
        self._join()
        options = {key: value for key, value in load_model_func_kwargs.items() if key != "map_location"}
        self._prepared.collect()
        is_main = world().rank == 0
        paths = exchange_results(lambda: self._source(input_dir) if is_main else None)
        folder = paths[0]
        assert folder is not None
        manifest = exchange_results(lambda: self._checked_manifest(folder))[world().rank]
        models = self._prepared.models

        def call_hooks() -> None:
            for hook in list(self._registered.load_hooks.values()):
                hook(models, str(folder))

        exchange_results(call_hooks)  # all at once: ranks may have different numbers of hooks
        saved: list[LoadedState] = []
        given = self._prepared, self._registered, self._gradients, models, self.copies, folder, manifest
        exchange_results(lambda: saved.append(LoadedState(*given, load_kwargs or {}, options)))
        saved[0].repeat_gradient_orders()
        exchange_results(saved[0].apply)
        if self.semantics == "moved" and not self.use_stateful_dataloader and self._prepared.loaders and is_main:
            warn(
                "load_state: prepared loaders continue after the last batch of the saved state, in its order. "
                "accelerate's load_state leaves them where they are, and does not restore the generators of their "
                'order. Use Accelerator(semantics="exact") to accept this, or semantics="accelerate" to do as it does',
                once="resumed passes",
            )
        configuration = self._automatic_naming()
        if configuration is not None:
            latest = max(state_folder.all_numbered(self._checkpoints()), default=-1)
            configuration.iteration = exchange(max(latest + 1, configuration.iteration))[0]

    def _source(self, input_dir: str | Path | None) -> Path:
        if input_dir is not None:
            folder = Path(input_dir).expanduser().resolve()
            state_folder.repair(folder)
            return folder
        if self._automatic_naming() is None:
            raise ArgumentError(
                "input_dir=None: give a folder, or an Accelerator with a project_dir and a project_config with "
                "automatic_checkpoint_naming=True"
            )
        found = list(state_folder.all_numbered(self._checkpoints()).values())
        if not found:
            raise ArgumentError(f"input_dir=None: {self._checkpoints()} has no saved state: save_state() writes one")
        return found[-1]

    def _checked_manifest(self, folder: Path) -> Manifest:
        """Return the folder's manifest, if it is of the objects that were prepared and registered here.

        Raises:
            ArgumentError: It is not.
        """
        self._prepared.check_any_left()
        manifest = Manifest.read(folder)
        manifest.check_files(folder, world().rank, world().size)
        now = self._kinds()
        for kind, names in now.items():
            before = manifest.kinds[kind]
            compared = kind in ("optimizer", "scheduler")  # the user may have renamed a class of a model
            if len(before) != len(names) or (compared and before != names):
                verb = "registered" if kind == "object" else "prepared"
                raise ArgumentError(
                    f"input_dir={str(folder)!r}: it has {_counted(kind, before)}, and this process has {verb} "
                    f"{_counted(kind, names)}: load it with the same objects as those it was saved with"
                )
        return manifest

    # ------------------------------------------------------------------ objects and hooks
    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the states of these objects too: anything with ``state_dict`` and ``load_state_dict``.

        Rank 0's state is saved, and loaded on every rank. It should hold tensors, numbers, strings, and containers of
        these; other types are pickled, and `load_state` then asks for ``load_kwargs={"weights_only": False}``.

        Raises:
            ArgumentError: An object lacks one of the two methods.
        """
        for thing in objects:
            missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(thing, name, None))]
            if missing:
                raise ArgumentError(f"objects: {thing!r:.80} has no {' and no '.join(missing)}: it needs both methods")
        self._registered.add_objects(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> HookHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before `save_state` writes.

        `models` are the users' own modules, without DDP, and `weights` their states, in the same order. The hook may
        write files of its own into `output_dir`, which is still the unfinished folder. States that it takes out of the
        list `weights` are not written.

        Returns:
            A handle; its ``remove()`` removes the hook.
        """
        return self._registered.add_hook(self._registered.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> HookHandle:
        """Call ``hook(models, input_dir)`` on every rank before `load_state` reads.

        `models` are the users' own modules, without DDP. Those that the hook takes out of the list are not loaded.

        Returns:
            A handle; its ``remove()`` removes the hook.
        """
        return self._registered.add_hook(self._registered.load_hooks, hook)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """See `nblaunch.training.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    # ------------------------------------------------------------------ models alone
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the module's ``state_dict``: of the user's own module, or with `unwrap` False of the prepared one.

        Where ranks divide the module this is a collective: every rank must call it. It gives the whole state on rank
        0's CPU; on other ranks an empty dict.
        """
        is_divided = model_states.are_divided([model])
        return model_states.whole_state(model) if unwrap or is_divided else model.state_dict()

    def save_model(
        self, model: nn.Module, save_directory: str | Path, max_shard_size: Any = None, safe_serialization: bool = True
    ) -> None:
        """Write a module's weights on the main process, in one file with accelerate's name, atomically. A collective.

        Args:
            model: A prepared module.
            save_directory: The folder, made if it is missing: other files in it stay.
            max_shard_size: Not supported: there is one file.
            safe_serialization: Write ``model.safetensors`` (default); this needs safetensors. False:
                ``pytorch_model.bin``, for ``torch.load``.

        Raises:
            ImportError: safetensors is not installed.
            OSError: On every rank, if the main process cannot write.
        """
        self._join()
        if max_shard_size is not None:
            warn(f"save_model: max_shard_size={max_shard_size!r} has no effect: all weights are in one file")
        state = self.get_state_dict(model)
        exchange_results(lambda: model_states.export(state, Path(save_directory).expanduser(), safe_serialization))

    # ------------------------------------------------------------------ inside
    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named folder."""
        configuration = self.project_configuration
        return 0 if configuration is None else int(configuration.iteration)

    @property
    def _prepared(self) -> PreparedObjects:
        """The objects that were prepared in this process."""
        found: PreparedObjects = vars(self).setdefault("_prepared_objects", PreparedObjects())
        return found

    @property
    def _registered(self) -> Registered:
        found: Registered = vars(self).setdefault("_registered_objects", Registered())
        return found


def _counted(kind: str, names: list[str]) -> str:
    return f"{len(names)} {kind}{'' if len(names) == 1 else 's'}" + (f" ({', '.join(names)})" if names else "")


def _warn_about_code(folder: Path) -> None:
    """Warn about files that `load_state` could not read: now, not only when they are needed."""
    for path in sorted(folder.glob("*.pt")):
        if path.name.startswith(("optimizer", "scheduler", "object")) and (found := model_states.code_in(path)):
            warn(
                f"save_state: {path.name} holds {found}, which runs code when it is loaded: load_state will need "
                'load_kwargs={"weights_only": False}. Better keep numbers, strings and tensors in the state'
            )
