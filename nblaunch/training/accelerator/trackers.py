"""`Trackers`: an Accelerator's values, in the notebook's panel and in experiment trackers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import ArgumentError
from nblaunch.ranks.report import report
from nblaunch.training.accelerator import plugin_settings
from nblaunch.training.accelerator.rank_roles import RankRoles
from nblaunch.training.accelerator.tracker_backends import TRACKERS, numbers_in
from nblaunch.training.topology import leave_group


class Trackers(RankRoles):
    """The part of an `Accelerator` that logs values and profiles."""

    @property
    def trackers(self) -> list[Any]:
        """The trackers that `init_trackers` started on this rank."""
        return self._trackers

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the trackers of ``log_with`` on the main process. The panel needs no start.

        Trackers of an earlier call are finished first.

        Args:
            project_name: The name of the run: TensorBoard's folder in ``logging_dir``, wandb's project.
            config: Hyperparameters to store. Default: none.
            init_kwargs: By a tracker's name, more arguments for ``SummaryWriter`` or ``wandb.init``.

        Raises:
            ArgumentError: A tracker's library is not installed, or it needs a ``project_dir``.
        """
        self._finish_trackers()
        for tracker in self.log_with:
            own = tracker
            if isinstance(tracker, str):
                own = TRACKERS[tracker](project_name, self.logging_dir, dict((init_kwargs or {}).get(tracker, {})))
            if not self._is_here(own):
                continue
            if hasattr(own, "start"):
                own.start()
            self._trackers.append(own)
            if config is not None:
                own.store_init_configuration(dict(config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of this name; with `unwrap` what it writes to, such as TensorBoard's ``SummaryWriter``.

        On ranks without trackers: an object that ignores every call.

        Raises:
            ArgumentError: There are trackers, and none has this name.
        """
        for tracker in self._trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self.is_main_process:
            return _Ignoring()
        names = [tracker.name for tracker in self._trackers]
        raise ArgumentError(f"name={name!r}: the trackers are {names}: give log_with and call init_trackers")

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Show this rank's values in the notebook, and write the main process's to the trackers.

        Args:
            values: By name, numbers and one-element tensors. The panel leaves other values and a value named ``step``
                out, and joins the names of nested mappings by ``/``; trackers get all.
            step: The training step, in any unit.
            log_kwargs: By a tracker's name, more arguments for its ``log``.

        Raises:
            ArgumentError: `values` is no mapping.
        """
        given: object = values
        if not isinstance(given, Mapping):
            raise ArgumentError(f"values={values!r:.80}: must be a mapping of names to values")
        shown = numbers_in(values)
        shown.pop("step", None)  # a loop may log it too
        report(step, **shown)
        for tracker in self._trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Finish the trackers, and end the process group if this package has made it, as under torchrun."""
        self._finish_trackers()
        leave_group()

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[torch.profiler.profile]:
        """A context that profiles, with torch's profiler as its value.

        Args:
            profile_handler: The settings, as accelerate's ``ProfileKwargs`` or a mapping. Default: those of
                ``kwargs_handlers``, else torch's. With ``output_trace_dir``, each rank's trace is written there as
                ``profile_<rank>.json``, and the end is a collective.
        """
        handler = profile_handler or self._handlers.profile or {}
        made, folder = plugin_settings.make_profile(handler)
        with made as profiler:
            yield profiler
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(Path(folder) / f"profile_{self.rank}.json"))
            self.wait_for_everyone()

    def _finish_trackers(self) -> None:
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.finish()

    def _is_here(self, tracker: Any) -> bool:
        return self.is_main_process or not getattr(tracker, "main_process_only", True)


class _Ignoring:
    """A tracker of a rank that has none: its attributes and results are itself, and nothing has an effect."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass
