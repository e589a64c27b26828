"""The default process group of a rank: made before the function runs, and stepping aside for the user's own.

`install` wraps ``torch.distributed.init_process_group`` right after torch's import, before anything can bind the
original. In a rank, the wrapper

* destroys our default group when the user's code asks for one of its own;
* gives every creation over ``env://`` or ``tcp://`` a prefix of its own in the store: a second group would
  otherwise read the addresses of the first, which are gone (both ranks fail after 41 s);
* serves a store on the user's own loopback port from 127.0.0.1 alone, where torch's would listen on every
  interface, and keeps it for the next creation, so that no rank can meet the store of the group before.

Anything else (a store of the user's, ``file://``, another machine's address) goes to torch as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from nblaunch.ranks.fork_guard import settling

if TYPE_CHECKING:
    from torch.distributed import Store

    from nblaunch.wire.messages import World

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_BACKLOG = 1024


@dataclass(slots=True)
class _Home:
    """This rank's place: where its launch meets, and which group is ours."""

    world: World
    rank: int
    world_size: int
    ours: Any = None
    stores: dict[tuple[str, int], Store] = field(default_factory=dict)
    created: dict[tuple[str, int], int] = field(default_factory=dict)


_home: _Home | None = None


def install() -> None:
    """Wrap ``init_process_group``; does nothing where it is wrapped already or torch has no distributed package."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.init_process_group, "__nblaunch__"):
        return
    wrapper = _wrap(dist.init_process_group)
    dist.init_process_group = wrapper
    dist.distributed_c10d.init_process_group = wrapper


def find_backends() -> None:
    """Look the backends up, once for all forked ranks: torch 2.15 reads every installed package's metadata for that."""
    import torch.distributed as dist

    ensure = getattr(dist.Backend, "_ensure_backend_registered", None)  # other versions have nothing to look up
    if ensure is not None:
        for name in ("gloo", "nccl"):
            ensure(name)


def join(world: World, rank: int, world_size: int) -> None:
    """Make the default group of this rank, which the user's code finds ready.

    A later task keeps the group of the one before, unless its world is of another generation.
    """
    global _home
    import torch.distributed as dist

    if _home is None or _home.world.generation != world.generation:
        leave()
        _home = _Home(world, rank, world_size)
    elif dist.is_initialized():
        return
    dist.init_process_group(world.backend)
    _home.ours = dist.group.WORLD
    settling.install()


def leave() -> None:
    """Destroy whatever default group there is. May hang: everything that matters was sent before."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _wrap(original: Callable[..., None]) -> Callable[..., None]:
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
        _step_aside(home)
        meeting = _meeting(home, init_method, world_size, rank) if store is None else None
        if meeting is None:
            with _without_agent_store():
                original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
            return
        host, port, world_size, rank = meeting
        prefixed = _prefixed(home, host, port, world_size, rank, timeout)
        original(backend, None, timeout, world_size, rank, prefixed, *args, **kwargs)
        _wait_for_all(prefixed, world_size)

    init_process_group.__nblaunch__ = True  # type: ignore[attr-defined]  # the mark that install looks for
    return init_process_group


def _step_aside(home: _Home) -> None:
    import torch.distributed as dist

    if home.ours is not None and dist.is_initialized() and dist.group.WORLD is home.ours:
        dist.destroy_process_group()
    home.ours = None


def _meeting(home: _Home, init_method: str | None, world_size: int, rank: int) -> tuple[str, int, int, int] | None:
    """(host, port, world size, rank) of a creation that we serve; None for one that torch must serve itself."""
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
        return None  # torch has the better words for what is missing
    if world_size < 1 or rank < 0 or port == 0:
        return None
    if _is_loopback(host) or (host, port) == (home.world.master_addr, home.world.master_port):
        return ("127.0.0.1" if host == "localhost" else host), port, world_size, rank
    return None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


@contextlib.contextmanager
def _without_agent_store() -> Iterator[None]:
    """Hide torchrun's agent store, which would make every rank a client of a port that nobody serves."""
    value = os.environ.pop(_AGENT_STORE, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[_AGENT_STORE] = value


def _prefixed(home: _Home, host: str, port: int, world_size: int, rank: int, timeout: timedelta | None) -> Store:
    from torch.distributed import PrefixStore

    place = (host, port)
    if place not in home.stores:
        home.stores[place] = _connect(home, host, port, world_size, rank, timeout)
    generation = home.created.get(place, 0)
    home.created[place] = generation + 1
    return PrefixStore(f"nblaunch/{home.world.generation}/gen{generation}", home.stores[place])


def _wait_for_all(store: Store, world_size: int) -> None:
    """Hold every rank until the last has joined: one that leaves at once would cut the others' connecting off."""
    if store.add("joined", 1) == world_size:
        store.set("all joined", "")
    store.wait(["all joined"])


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
        listener.detach()  # it is the store's now
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
            f"MASTER_PORT={port} on {host} is in use, by another launch or program: choose another port, or leave "
            "out init_process_group and use the group that nblaunch has made ready",
        ) from None
    sock.listen(_BACKLOG)
    return sock
