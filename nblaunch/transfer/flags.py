"""Flags of Python, NumPy and torch that a rank takes from the notebook, as a fork would inherit them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class _Flag(NamedTuple):
    module: str
    read: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


def _attribute(module: str, name: str) -> _Flag:
    return _Flag(module, lambda m: getattr(m, name), lambda m, v: setattr(m, name, v))


def _kernel_of_attention(name: str) -> _Flag:
    return _Flag(
        "torch.backends.cuda",
        lambda m: getattr(m, f"{name}_sdp_enabled")(),
        lambda m, v: getattr(m, f"enable_{name}_sdp")(v),
    )


FLAGS: dict[str, _Flag] = {
    "recursion limit": _Flag("sys", lambda m: m.getrecursionlimit(), lambda m, v: m.setrecursionlimit(v)),
    "start method": _Flag(
        "multiprocessing", lambda m: m.get_start_method(allow_none=True), lambda m, v: m.set_start_method(v, force=True)
    ),
    "errors": _Flag("numpy", lambda m: m.geterr(), lambda m, v: m.seterr(**v)),
    "default dtype": _Flag("torch", lambda m: m.get_default_dtype(), lambda m, v: m.set_default_dtype(v)),
    "default device": _Flag("torch", lambda m: m.get_default_device().type, lambda m, v: _set_device(m, v)),
    "matmul precision": _Flag(
        "torch", lambda m: m.get_float32_matmul_precision(), lambda m, v: m.set_float32_matmul_precision(v)
    ),
    "deterministic": _Flag(
        "torch",
        lambda m: (m.are_deterministic_algorithms_enabled(), m.is_deterministic_algorithms_warn_only_enabled()),
        lambda m, v: m.use_deterministic_algorithms(v[0], warn_only=v[1]),
    ),
    "gradients": _Flag("torch", lambda m: m.is_grad_enabled(), lambda m, v: m.set_grad_enabled(v)),
    "anomaly detection": _Flag(
        "torch",
        lambda m: (m.is_anomaly_enabled(), m.is_anomaly_check_nan_enabled()),
        lambda m, v: m.autograd.set_detect_anomaly(*v),
    ),
    "mkldnn": _Flag("torch", lambda m: m._C._get_mkldnn_enabled(), lambda m, v: m._C._set_mkldnn_enabled(v)),
    "sharing strategy": _Flag(
        "torch.multiprocessing", lambda m: m.get_sharing_strategy(), lambda m, v: m.set_sharing_strategy(v)
    ),
    **{f"cudnn.{name}": _attribute("torch.backends.cudnn", name) for name in ("enabled", "deterministic", "benchmark")},
    **{f"{name} attention": _kernel_of_attention(name) for name in ("flash", "mem_efficient", "math", "cudnn")},
}
"""To take another flag along, add a row. The value must pickle, and reading it must be cheap."""


def read_flags() -> dict[str, Any]:
    flags = {}
    for name, flag in FLAGS.items():
        module = sys.modules.get(flag.module)
        if module is not None:
            # another torch, or another thread is importing it; or torch refuses, after a change of its newer options
            with contextlib.suppress(AttributeError, RuntimeError):
                flags[name] = flag.read(module)
    return flags


def set_flags(flags: Mapping[str, Any]) -> None:
    """Set the flags that differ: setting some is slow (determinism imports the compiler, which takes 2 s)."""
    for name, value in flags.items():
        module, read, set_flag = FLAGS[name]
        found = importlib.import_module(module)
        if read(found) != value:
            set_flag(found, value)


def _set_device(torch: Any, kind: str) -> None:
    """Set the default device: of GPUs the rank's own. Ranks on CPUs keep the CPU."""
    if kind != "cuda" or torch.cuda.is_available():
        torch.set_default_device(kind)
