"""What all code of a process shares, and an import may change: read before and after, to be compared."""

from __future__ import annotations

import gc
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import weakref
from typing import Any


def state() -> dict[str, object]:
    """What is shared, by the names that users know it by; `warnings.filters` are the ranks' to take over."""
    return {**_of_python(), **_of_numpy(), **_of_torch()}


def _of_python() -> dict[str, object]:
    root = logging.getLogger()
    umask = os.umask(0o77)
    os.umask(umask)
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {
        "os.environ": dict(os.environb),  # which notes nothing as read
        "sys.path": list(sys.path),
        "sys.meta_path": sys.meta_path[:1],  # six appends to it, for names of its own
        "the locale": locale.setlocale(locale.LC_ALL),
        "the timeout of sockets": socket.getdefaulttimeout(),
        "the working directory": os.getcwd(),
        "the umask": umask,
        "the limits of the process": [resource.getrlimit(getattr(resource, name)) for name in limits],
        "the garbage collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "random's state": random.getstate(),
        "logging's root": (root.level, list(root.handlers), logging.root.manager.disable),
        "the start method of multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "how signals are handled": [signal.getsignal(number) for number in signal.valid_signals()],
        "sys's hooks": (sys.excepthook, sys.displayhook, sys.getrecursionlimit(), sys.stdout, sys.stderr),
    }


def _of_numpy() -> dict[str, object]:
    import numpy

    random_state: Any = numpy.random.get_state()
    return {
        "NumPy's random state": (random_state[1].tobytes(), *random_state[2:]),
        "NumPy's settings": (numpy.geterr(), numpy.get_printoptions()),
    }


def _of_torch() -> dict[str, object]:
    import torch
    from torch import multiprocessing as torch_multiprocessing

    return {
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "torch's settings": (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            vars(torch._tensor_str.PRINT_OPTS).copy(),
            torch_multiprocessing.get_sharing_strategy(),
        ),
    }


def generators() -> set[int]:
    """The generators of random numbers in this process; those of the operating system are everyone's.

    A ``torch.Generator`` starts from the same seed in every process, so it may be there before.
    """
    import numpy

    kinds = (random.Random, numpy.random.Generator, numpy.random.RandomState)
    return {
        id(each)
        for each in gc.get_objects()
        if issubclass(kind := type(each), kinds) and not issubclass(kind, random.SystemRandom)  # proxies are left alone
    }


def finalizers() -> dict[int, str]:
    """What ``weakref.finalize`` is to do at the exit, and of which module that is."""
    registry: dict[object, Any] = getattr(weakref.finalize, "_registry", {})
    return {id(each): str(getattr(info.func, "__module__", "")) for each, info in list(registry.items()) if info.atexit}
