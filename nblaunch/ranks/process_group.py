"""A rank's default process group: initialized before the function runs, replaced when the user initializes one.

Runs in ranks; the fork server calls `install` and `find_backends` ahead. `install` wraps
``torch.distributed.init_process_group`` right after torch's import, before any module can bind the original. In a
rank, the wrapper

* destroys nblaunch's default group when user code initializes its own;
* gives every ``env://`` and ``tcp://`` initialization a store prefix of its own. Otherwise a second group would read
  the stale addresses of the first, and all ranks fail after 41 s;
* serves the store for a loopback MASTER_ADDR on 127.0.0.1 alone, where torch listens on every interface. The store
  stays for the next initialization, so no rank can connect to an earlier one;
* refuses a group of all ranks while one of them is dead, in a session. Torch would wait for it for 30 minutes.

Everything else (a store of the user's, ``file://``, another host's address) goes to torch unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from nblaunch.errors import RankError
from nblaunch.machine import timeouts
from nblaunch.ranks import group_sockets
from nblaunch.ranks.collective_log import collective_log, install_kernels
from nblaunch.ranks.fork_guard import guard

if TYPE_CHECKING:
    from torch.distributed import Store

    from nblaunch.wire.messages import World

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_BACKLOG = 1024


@dataclass(slots=True)
class _Home:
    """This rank's rendezvous, and the groups and stores that it has made there."""

    world: World
    rank: int
    world_size: int
    ours: Any = None
    """The default group that `join` initialized, until the user replaces it."""
    stores: dict[tuple[str, int], Store] = field(default_factory=dict)
    created: dict[tuple[str, int], int] = field(default_factory=dict)
    """The number of groups initialized at each (host, port)."""


_home: _Home | None = None


def install() -> None:
    """Wrap ``init_process_group``, and what makes each process group.

    Nothing happens if they are wrapped already, or if torch was built without distributed.
    """
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.init_process_group, "__nblaunch__"):
        return
    wrapper = _wrap(dist.init_process_group)
    dist.init_process_group = wrapper
    dist.distributed_c10d.init_process_group = wrapper
    mesh: Any = sys.modules.get("torch.distributed.device_mesh")  # it has bound the original with torch's import
    if hasattr(mesh, "init_process_group"):
        mesh.init_process_group = wrapper
    module: Any = dist.distributed_c10d
    make = getattr(module, "_new_process_group_helper", None)
    if make is not None:
        module._new_process_group_helper = _watching(make)
    if not hasattr(dist.ProcessGroup, "register_pre_hook"):
        install_kernels()


def find_backends() -> None:
    """Load torch's backend registry once for all forked ranks: torch 2.15 reads every package's metadata for it."""
    import torch.distributed as dist

    ensure = getattr(dist.Backend, "_ensure_backend_registered", None)  # older versions have none
    if ensure is not None:
        for name in ("gloo", "nccl"):
            ensure(name)


def join(world: World, rank: int, world_size: int) -> None:
    """Initialize this rank's default group, before user code runs.

    A later task keeps the group of the previous one, unless the generation has changed. While a rank is missing there
    is no group.
    """
    global _home
    import torch.distributed as dist

    if _home is None or _home.world.generation != world.generation:
        if _home is not None:  # else the group is the notebook's, of a fork of the kernel: destroying it would hang
            leave()
        _home = _Home(world, rank, world_size)
    elif dist.is_initialized():
        return
    if world.no_group:
        return
    limit = _limit(world)
    with group_sockets.joining():
        dist.init_process_group(world.backend, timeout=None if limit is None else timedelta(seconds=limit))
    _home.ours = dist.group.WORLD
    guard.install()


def _limit(world: World) -> float | None:
    """Return how long torch lets a collective wait, in seconds; None: torch's default.

    Where the user may debug, the kernel ends a task that gets no further in place of torch, if it sees that ranks wait
    in a collective. It does not with NCCL, whose calls return at once.
    """
    if not world.waits_for_user:
        return None
    return timeouts.COLLECTIVE_TIMEOUT_S if "nccl" in world.backend else timeouts.DEBUGGED_COLLECTIVE_TIMEOUT_S


def leave(*, is_last: bool = False) -> None:
    """Destroy the default group, if any. May hang: send every message before.

    Args:
        is_last: Whether the rank exits: what it has begun then stays known. Default: False.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        if not is_last:
            group_sockets.finish_on_gpus()
        dist.destroy_process_group()
    if not is_last:
        collective_log.end_groups()


def _watching(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        with contextlib.suppress(Exception):  # torch's own function, which may change: nothing is logged then
            ranks = args[2] if len(args) > 2 else kwargs["global_ranks_in_group"]
            collective_log.watch(made[0] if isinstance(made, tuple) else made, ranks)
        return made

    return new_process_group_helper


def _wrap(original: Callable[..., None]) -> Callable[..., None]:
    import torch.distributed as dist

    @functools.wraps(original)
    def init_process_group(
        backend: Any = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Store | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        home = _home
        if home is None:
            original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
            return
        if home.ours is not None and dist.is_initialized() and dist.group.WORLD is home.ours:
            dist.destroy_process_group()
        home.ours = None
        rendezvous = _rendezvous(home, init_method, world_size, rank) if store is None else None
        if rendezvous is None:
            with _without_agent_store():
                original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
            return
        host, port, world_size, rank = rendezvous
        if home.world.no_group and world_size >= home.world_size:
            raise RankError(home.world.no_group)
        prefixed = _store(home, host, port, world_size, rank, timeout)
        original(backend, None, timeout, world_size, rank, prefixed, *args, **kwargs)
        # A rank that leaves early would break connections that its peers are still making.
        if prefixed.add("joined", 1) == world_size:
            prefixed.set("all joined", "")
        prefixed.wait(["all joined"])

    init_process_group.__nblaunch__ = True  # type: ignore[attr-defined]  # checked by install
    return init_process_group


def _rendezvous(home: _Home, init_method: str | None, world_size: int, rank: int) -> tuple[str, int, int, int] | None:
    """Return (host, port, world size, rank) of an initialization that uses our store; None if torch must handle it."""
    url = urlparse(init_method or "env://")
    if url.scheme not in ("env", "tcp") or url.query:
        return None
    try:
        if url.scheme == "env":
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
            rank = int(os.environ["RANK"]) if rank < 0 else rank
        else:
            host, port = url.hostname or "", int(url.port or 0)
    except (KeyError, ValueError):
        return None  # torch's own error names what is missing
    if world_size < 1 or rank < 0 or port == 0:
        return None
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    if is_loopback or (host, port) == (home.world.master_addr, home.world.master_port):
        return ("127.0.0.1" if host == "localhost" else host), port, world_size, rank
    return None


@contextlib.contextmanager
def _without_agent_store() -> Iterator[None]:
    """Hide torchrun's agent store variable, which would make every rank a client of a store that has no server."""
    value = os.environ.pop(_AGENT_STORE, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[_AGENT_STORE] = value


def _store(home: _Home, host: str, port: int, world_size: int, rank: int, timeout: timedelta | None) -> Store:
    from torch.distributed import PrefixStore

    address = (host, port)
    if address not in home.stores:
        home.stores[address] = _connect(home, host, port, world_size, rank, timeout)
    generation = home.created.get(address, 0)
    home.created[address] = generation + 1
    return PrefixStore(f"nblaunch/{home.world.generation}/gen{generation}", home.stores[address])


def _connect(home: _Home, host: str, port: int, world_size: int, rank: int, timeout: timedelta | None) -> Store:
    from torch.distributed import TCPStore
    from torch.distributed.distributed_c10d import default_pg_timeout

    serves = rank == 0 and (host, port) != (home.world.master_addr, home.world.master_port)
    listener = _listen(host, port) if serves else None
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=serves,
        timeout=timeout or default_pg_timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.fileno(),
        use_libuv=True,
    )
    if listener is not None:
        listener.detach()  # the store owns the descriptor now
    return store


def _listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno,
            f"MASTER_PORT={port} on {host} is in use by another launch or program. Choose another port, or remove the "
            "call of init_process_group: nblaunch has initialized the default group already",
        ) from None
    sock.listen(_BACKLOG)
    return sock
