"""The engines of this process: the only place that chooses one."""

from __future__ import annotations

import atexit
import importlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nblaunch.engines.local import LocalEngine
from nblaunch.engines.protocol import Engine
from nblaunch.engines.rank_files import LeftFiles
from nblaunch.errors import ArgumentError
from nblaunch.machine import arguments

if TYPE_CHECKING:
    from nblaunch.engines.node_engine import Starter  # which imports ZeroMQ

engine = LocalEngine()
"""This machine."""
_STARTERS = {"slurm": "SlurmStarter", "ray": "RayStarter", "ssh": "SshStarter"}
"""By kind: the class in the module of that name, which is imported when it is asked for."""
KINDS = ("auto", "local", *_STARTERS)
_held: dict[tuple[str, int | None], Engine] = {}
"""Engines of other machines, by what the user has asked for: they hold nodes between launches."""


def chosen(name: Any = "auto", num_nodes: Any = None) -> Engine:
    """Return the engine for ``engine=`` and ``num_nodes=``; the same one for the same words.

    `name` begins with one of `KINDS`, with its own options behind it. Without `num_nodes` the engine decides.

    ArgumentError: there is no such engine, or it cannot have that many nodes.
    """
    kind, words, count = _asked(name, num_nodes)
    if kind == "auto":
        kind = "slurm" if count != 1 and _in_several_nodes() else "local"
        if kind == "local" and count not in (None, 1):
            raise ArgumentError(
                f"num_nodes={count}: engine='auto' uses only this machine; choose another engine, such as "
                "engine='slurm', engine='ray' or engine='ssh gpu1 gpu2'"
            )
    if kind == "local":
        return engine
    said = shlex.join([kind, *words])
    if (said, count) in _held:
        return _held[said, count]
    from nblaunch.engines.node_engine import NodeEngine

    starter = _starter(kind, words, count)
    for key, other in list(_held.items()):
        if key[0] == said and key[1] != starter.count and isinstance(other, NodeEngine) and not other.is_busy:
            _held.pop(key).stop()  # its nodes may be those that are asked for
    if not _held:
        atexit.register(release)  # at once: agents alone notice the end of this process later
    return _held.setdefault((said, starter.count), NodeEngine(starter))


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What ``engine=`` and ``num_nodes=`` ask for, for a job file."""

    kind: str
    nodes: int
    options: tuple[tuple[str, ...], ...] = ()


def job_request(name: Any = "auto", num_nodes: Any = None) -> JobRequest:
    """Return what a job file needs of the engine; its job may have more nodes. Nothing is started or held.

    ArgumentError: there is no such engine, or an option is invalid.
    """
    kind, words, count = _asked(name, num_nodes)
    if kind == "local" or (kind == "auto" and (count is not None or not _in_several_nodes())):
        return JobRequest(kind, count or 1)
    starter = _starter("slurm" if kind == "auto" else kind, words, None)  # which checks the options
    nodes = count or starter.count
    if kind != "slurm":
        return JobRequest(kind, nodes)
    from nblaunch.engines.slurm import options_of

    return JobRequest(kind, nodes, tuple(options_of(words)))


def _in_several_nodes() -> bool:
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1


def _asked(name: Any, num_nodes: Any) -> tuple[str, list[str], int | None]:
    """Return the kind of engine, its options and the number of nodes."""
    if not isinstance(name, str) or not name.strip():
        raise ArgumentError(f"engine={name!r}: must be one of {', '.join(map(repr, KINDS))}")
    try:
        kind, *words = shlex.split(name)
    except ValueError as error:
        raise ArgumentError(f"engine={name!r}: {error}") from None
    if kind not in KINDS:
        raise ArgumentError(f"engine={name!r}: must begin with one of {', '.join(map(repr, KINDS))}")
    if kind in ("auto", "local") and words:
        raise ArgumentError(f"engine={name!r}: {kind!r} takes no options")
    count = None if num_nodes is None else arguments.whole_number("num_nodes", num_nodes, least=1)
    if kind == "local" and count not in (None, 1):
        raise ArgumentError(f"num_nodes={count}: engine='local' uses only this machine")
    return kind, words, count


def _starter(kind: str, words: list[str], count: int | None) -> Starter:
    module = importlib.import_module(f"nblaunch.engines.{kind}")
    return cast("Starter", getattr(module, _STARTERS[kind])(words, count))


def status() -> list[str]:
    return [*engine.status(), *(line for each in held() for line in each.status())]


def held() -> list[Engine]:
    return list(_held.values())


def release() -> list[str]:
    """Free the nodes of other machines; return a line for each engine that held some."""
    lines = [line for each in held() for line in each.status()]
    while _held:
        _held.popitem()[1].stop()
    atexit.unregister(release)
    return lines


def files_of(rank: int, log_dir: Path) -> LeftFiles:
    """Return what a rank has written to a log directory of this machine, on whichever machine it runs."""
    return LeftFiles(rank, log_dir)


def stop() -> None:
    release()
    engine.stop()
