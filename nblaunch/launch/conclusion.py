"""The outcome of an attempt: the return values of the ranks, and the errors of a stopped launch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch.errors import NblaunchError, ResultError, text_of
from nblaunch.launch import failures
from nblaunch.launch.attempt import Attempt
from nblaunch.launch.headlines import headline_of
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.session_turn import Turn
from nblaunch.launch.stopping import ByUser, Told
from nblaunch.launch.task import Task
from nblaunch.transfer.parcel import unpack

MAX_PLACES = 8
"""Ranks whose place a timeout's message names."""


def load_results(
    parcels: Mapping[int, Sequence[int]], files: LaunchFiles
) -> tuple[dict[int, Any], BaseException | None]:
    """Return the value of each rank, and the error of the first value that cannot be rebuilt here."""
    values: dict[int, Any] = {}
    error: BaseException | None = None
    for rank, fds in sorted(parcels.items()):
        try:
            values[rank] = unpack(fds)
        except BaseException as trouble:  # noqa: BLE001  # user code, which may call sys.exit
            error = error or ResultError(
                f"rank {rank}'s return value cannot be rebuilt in the notebook: {type(trouble).__name__}: {trouble}. "
                f"{failures.result_advice(type(trouble).__name__)}",
                rank,
                files.err(rank),
            )
            error.__cause__ = trouble
    return values, error


def account_of(name: str, attempt: Attempt | Turn, files: LaunchFiles, *, is_shown: bool) -> failures.Account:
    """Return what the exception of a failed attempt is made from.

    Args:
        name: The function's name.
        attempt: The attempt.
        files: Its logs.
        is_shown: See `failures.Account`.
    """
    task, sources = attempt.task, attempt.job.sources
    ends, logs = [rank.end for rank in task.present], {rank.rank: rank.logs for rank in attempt.output.ranks}
    hosts = attempt.job.plan.hosts
    return failures.Account(
        name, ends, files, sources, logs, attempt.hint, task.difference, attempt.session, hosts, is_shown
    )


def stop_error(name: str, attempt: Attempt | Turn, seconds: float) -> NblaunchError:
    """Return the error of a launch that the user or its timeout stopped.

    Args:
        name: The function's name.
        attempt: The last attempt.
        seconds: How long the launch has run.
    """
    task = attempt.task
    reason = task.ladder.reason if task.ladder is not None else ByUser()
    limit, files = attempt.job.plan.options.timeout, attempt.files
    return reason.error(Told(name, seconds, limit, _incomplete(task), _places(task), task.difference, files))


def _incomplete(task: Task) -> str:
    """Describe failures during the stop: a checkpoint may be incomplete."""
    raised = [rank.failed for rank in task.ranks if rank.failed and rank.failed.kind not in ("interrupt", "exit")]
    parts = [f"rank {f.rank} raised {headline_of(f.type_name, f.text)}" for f in raised if not f.collective]
    killed = task.ladder.killed & task.ladder.answered if task.ladder is not None else set()
    parts += [
        f"rank {rank.rank} was killed before its `finally` had ended"
        for rank in task.ranks
        if rank.rank in killed and rank.done is None and rank.failed is None
    ]
    return "; meanwhile " + ", ".join(parts) if parts else ""


def _places(task: Task) -> str:
    """Describe where the ranks were at the timeout."""
    places = task.inspector.said or {}
    lines = [f"rank {rank} {place}" for rank, place in list(places.items())[:MAX_PLACES]]
    lines += ["…"] if len(places) > MAX_PLACES else []
    lines += [task.stuck.text] if task.stuck is not None else []
    return "\n" + "\n".join(f"    {line}" for line in lines) + "\n" if lines else " "


def changed_names(task: Task) -> set[str]:
    """Return the names of arguments and globals that ranks have modified and not returned."""
    return {name for rank in task.ranks if rank.done is not None for name in rank.done.changed}


def copy_note(name: str) -> str:
    """Return the note on a name that the ranks have modified."""
    return (
        f"`{name}` was modified in the ranks, but ranks work on copies. Return it (for a module, its `state_dict()`) "
        "to get the new value"
    )


def interruption(message: str, results: Mapping[int, Any]) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt that IPython shows as one line, with what the ranks had returned."""
    interrupt: Any = KeyboardInterrupt(message)
    attach_results(results, interrupt)
    interrupt.__notes__ = []
    failures.show_as(interrupt, [f"KeyboardInterrupt: {message}"], interrupt.__notes__)
    return interrupt  # type: ignore[no-any-return]  # Any, to give it attributes


def attach_results(results: Mapping[int, Any], error: Any) -> None:
    """Give an error what the ranks returned, unless it is a user's error with ``results`` of its own."""
    with contextlib.suppress(Exception):  # a user's __getattr__ or __setattr__
        if isinstance(error, NblaunchError) or not hasattr(error, "results"):
            error.results = dict(results)


def keep_logs(error: Any, files: object) -> None:
    """Keep the logs, which the error names, for the lifetime of the error."""
    with contextlib.suppress(Exception):  # a user's __setattr__, or no error
        error._nblaunch_files = files


def summary(error: BaseException) -> str:
    """Return an error in one line."""
    rank = getattr(error, "rank", -1)
    return f"{f'rank {rank}: ' if rank >= 0 else ''}{headline_of(type(error).__name__, text_of(error))}"
