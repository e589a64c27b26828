"""The collectives that a rank has begun, by process group, with the user's line of the last one.

torch calls a hook before each collective of a process group, also for those of DDP's backward pass. Versions before
2.14 have no such hook. There `install_kernels` adds kernels to torch's dispatcher, which every collective passes on its
way to the backend. Collectives of a thread of the user, such as one that saves a checkpoint, are not logged: the thread
may be anywhere when the rank is looked at.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from nblaunch.machine.own_code import COLLECTIVE_LOG, is_file, is_users
from nblaunch.wire.messages import CollectivesBegun
from nblaunch.wire.tables import POINT_TO_POINT, UNKNOWN, Begun, CollectiveRows, fitting, in_ranges

_HOOK_ID = 0x6E626C
_KERNELS: list[Any] = []
"""Keeps the kernels of `install_kernels` registered."""
_CALL = re.compile(r"allreduce|broadcast|reduce_scatter|reduce|allgather|gather|scatter|alltoall|\w*barrier|send|recv")
"""Finds the hook's name of a call, such as ALLGATHER, in that of the operator, ``_allgather_base_``."""
_is_users = functools.lru_cache(maxsize=4096)(is_users)


@functools.lru_cache(maxsize=64)
def _name_of(kind: Any) -> str:
    """Return the name of a kind of call; torch takes long to find it."""
    return str(kind.name)


@dataclass(slots=True)
class _Group:
    name: str
    members: str
    count: int = 0
    last: Begun = field(default_factory=Begun)


class CollectiveLog:
    """See the module. Used from the thread of the tasks."""

    def __init__(self) -> None:
        self._thread = 0
        self._rows: CollectiveRows | None = None
        self._default: _Group | None = None
        self._groups: dict[str, _Group] = {}
        """By name; none where torch has the hook."""
        self._uncertain = 0
        self._place = (0, 1)
        self.listener: Callable[[Begun, bool], None] | None = None
        """Gets each collective as it begins, and whether its tensors are on the CPU."""

    def open(self, scratch: str, rank: int, world_size: int) -> None:
        """Log to this rank's rows of the table, for the kernel, from now on."""
        self._thread, self._place = threading.get_ident(), (rank, world_size)
        self._rows = CollectiveRows(scratch, rank)

    def begin_task(self) -> None:
        """Count what `CollectivesBegun.uncertain` counts from 0: another task begins."""
        self._uncertain = 0

    def begun(self) -> CollectivesBegun:
        if self._default is None:
            return CollectivesBegun(uncertain=self._uncertain)
        return CollectivesBegun(self._default.last, self._uncertain, is_counted=True)

    def end_groups(self) -> None:
        """Forget what was begun: the process groups are destroyed. Later ones have the same names."""
        self._default = None
        self._groups = {}
        if self._rows is not None:
            self._rows.clear()

    def watch(self, group: Any, ranks: Any) -> None:
        """Log the collectives of a new process group of these global `ranks`; none: the default group."""
        if not ranks:
            self.end_groups()
        if self._rows is None:
            return
        made = _Group(str(group.group_name), self._members(group, ranks))
        if not ranks:
            self._default = made
        self._rows.write(Begun(group=made.name, members=made.members))  # in place of a group that had the name
        if hasattr(group, "register_pre_hook"):
            group.register_pre_hook(_HOOK_ID, functools.partial(self._on_hook, made))
        else:
            self._groups[made.name] = made

    def _members(self, group: Any, ranks: Any) -> str:
        """Return the launch's ranks of a group, which differ from torch's where the user made a world of his own."""
        dist: Any = sys.modules["torch.distributed"]
        world = (group.rank(), group.size()) if not ranks else (dist.get_rank(), dist.get_world_size())
        if world != self._place:
            return UNKNOWN
        return fitting(in_ranges(ranks)) if ranks else ""

    def _on_hook(self, group: _Group, call: Any) -> None:
        self._note(group, _name_of(call.name), call.input_tensors or call.output_tensors)

    def on_kernel(self, group: Any, name: str, tensors: list[Any]) -> None:
        found = self._groups.get(group.group_name)
        if found is not None:
            self._note(found, name, tensors)

    def _note(self, group: _Group, name: str, tensors: list[Any]) -> None:
        frame: FrameType | None = sys._getframe().f_back
        is_other_threads = threading.get_ident() != self._thread and _is_of_user(threading.get_ident())
        is_transfer = name in POINT_TO_POINT
        if is_transfer or is_other_threads or group is not self._default:
            self._uncertain += 1
        if is_other_threads:
            return
        group.count += not is_transfer
        with contextlib.suppress(Exception):  # logging must never fail a collective
            while frame is not None and not _is_users(frame.f_code.co_filename):
                frame = frame.f_back
            file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
            detail = _shown(len(tensors), tensors[0].numel(), tensors[0].dtype) if tensors else ""
            begun = Begun(group.count, line, time.monotonic_ns(), group.name, group.members, name.lower(), detail, file)
            if self._rows is not None:
                self._rows.write(begun)
            if not is_transfer:
                group.last = begun
            if (listener := self.listener) is not None:
                listener(begun, not tensors or tensors[0].device.type == "cpu")


def _is_of_user(thread: int) -> bool:
    """Return True for a thread that `threading` has started, unlike those of autograd."""
    found = threading._active.get(thread)  # type: ignore[attr-defined]  # current_thread() would add autograd's
    return found is not None and not isinstance(found, threading._DummyThread)


def _shown(tensors: int, numel: int, dtype: Any) -> str:
    more = f" and {tensors - 1} more" if tensors > 1 else ""
    return f"{numel} {str(dtype).removeprefix('torch.')}{more}"


collective_log = CollectiveLog()


def install_kernels() -> None:
    """Have the dispatcher pass the collectives of this process and its forks to the log; for torch before 2.14.

    The kernels have a key that no operator of torch.distributed uses, and pass each call on to the keys below. Wrapping
    Python functions would miss what C++ code calls: DDP's collectives, and those of divided tensors. A call takes some
    18 us more, where the hook takes 8 us more.
    """
    import torch

    key = torch._C.DispatchKey.BackendSelect
    below = torch._C._dispatch_keyset_full_after(key)
    library = torch.library.Library("c10d", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::") and "." not in name:  # a vendor's overload
            operator = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
            if any(argument.name == "process_group" for argument in operator._schema.arguments):
                library.impl(operator, _kernel(operator, below), key.name, with_keyset=True)
    _KERNELS.append(library)


def _kernel(operator: Any, below: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    group_at = names.index("process_group")
    inputs_at = next((at for at, name in enumerate(names) if name.startswith(("input", "tensors"))), None)
    found = _CALL.search(operator._schema.name.removeprefix("c10d::"))
    call = found[0].upper() if found else operator._schema.name
    unbox = sys.modules["torch.distributed"].ProcessGroup.unbox
    go_on = operator._handle.redispatch_boxed

    def kernel(keys: Any, *args: Any) -> Any:
        with contextlib.suppress(Exception):  # logging must never fail a collective
            tensors = [] if inputs_at is None else _flat(args[inputs_at]) or _flat(args[0])
            collective_log.on_kernel(unbox(args[group_at]), call, tensors)
        return go_on(keys & below, *args)

    return kernel


def cut_kernel(error: BaseException) -> None:
    """Let a traceback that ends in a kernel end in torch's call of it, as with other versions of torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_next is None and is_file(trace.tb_next.tb_frame.f_code.co_filename, COLLECTIVE_LOG):
            trace.tb_next = None
        trace = trace.tb_next


def _flat(tensors: Any) -> list[Any]:
    return [each for some in tensors for each in _flat(some)] if isinstance(tensors, list) else [tensors]
