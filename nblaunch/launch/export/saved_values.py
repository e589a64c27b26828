"""What values consist of, and which of them a file can hold."""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import types
from collections.abc import Iterable
from typing import Any

from nblaunch.transfer import pickling

MAX_DATA_BYTES = 500_000_000
"""Of all data beside a script."""
FIX = "create it in the cell or function"
_DIGEST_BYTES = 16


class Survey(pickle.Pickler):
    """Pickles a value without its tensors, and notes what it consists of.

    Attributes:
        tensors: Its tensors, each once.
        shared: The ids of its lists, dicts, sets, arrays and tensors' storages: what two values may have in common.
        definitions: The names of ``__main__`` that it refers to.
        size: Bytes, with the tensors.
    """

    def __init__(self, value: Any) -> None:
        self.tensors: dict[int, Any] = {}
        self.shared: set[tuple[str, int]] = set()
        self.definitions: set[str] = set()
        self._torch = sys.modules.get("torch")
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        file = io.BytesIO()
        super().__init__(file, protocol=4)
        self.dump(value)
        content = file.getbuffer()
        self.digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
        self.size = len(content) + sum(dict(map(_memory, self.tensors.values())).values())

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, (list, dict, set, bytearray)) or type(obj).__module__ == "numpy":
            self.shared.add(("object", id(obj)))
            self._kept.append(obj)  # a temporary object's id may be used again
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            self.definitions.add(obj.__qualname__.partition(".")[0])
        if self._torch is not None and isinstance(obj, self._torch.Tensor):
            self.tensors.setdefault(id(obj), obj)
            self._numbers.setdefault(id(obj), len(self._numbers))
            self.shared.add(("storage", _memory(obj)[0]))
            number = self._numbers[id(obj)]
            return number, str(type(obj)), tuple(obj.shape), str(obj.dtype), str(obj.device), obj.requires_grad
        return None


def _memory(tensor: Any) -> tuple[int, int]:
    """Return what identifies a tensor's memory, and its bytes."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and others: they have none
        return id(tensor), tensor.numel() * tensor.element_size()
    return storage.data_ptr() or id(tensor), storage.nbytes()


def is_same(value: Survey, again: Survey) -> bool:
    """Return True if two values are equal and have the same tensors, not only equal ones."""
    return value.digest == again.digest and all(
        one is other or _has_same_memory(one, other)
        for one, other in zip(value.tensors.values(), again.tensors.values(), strict=True)
    )


def is_same_module(module: Any, value: Survey, again: Survey) -> bool:
    """Return True if a new module equals `module` once it has loaded its ``state_dict``."""
    torch = sys.modules["torch"]
    loaded = {id(each) for each in module.state_dict(keep_vars=True).values()}
    return value.digest == again.digest and all(
        id(one) in loaded or torch.equal(one, other)
        for one, other in zip(value.tensors.values(), again.tensors.values(), strict=True)
    )


def set_mode(module: Any, is_training: bool, others: Iterable[Any]) -> None:
    """Set a module to training or evaluation; those of the others that it contains keep theirs."""
    modes = [(each, each.training) for other in others if is_module(other) for each in other.modules()]
    module.train(is_training)
    for each, mode in modes:
        each.training = mode


def _has_same_memory(one: Any, other: Any) -> bool:
    return bool(
        one.data_ptr() == other.data_ptr() != 0 and one.stride() == other.stride() and one.device == other.device
    )


# ------------------------------------------------------------------ kinds of values
def is_tensor(value: Any) -> bool:
    """Return True for a plain tensor or parameter."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def is_module(value: Any) -> bool:
    """Return True for a ``torch.nn.Module``."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_array(value: Any) -> bool:
    """Return True for an array of numbers that torch can hold."""
    numpy = sys.modules.get("numpy")
    is_plain = numpy is not None and type(value) in (numpy.ndarray, numpy.memmap)
    return is_plain and value.dtype.kind in "biufc" and value.dtype.isnative


def is_map(value: Any) -> bool:
    """Return True for an array that NumPy has mapped from a file."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.memmap and value._mmap is not None  # not computed from one


def compact(value: Any) -> Any:
    """Return a tensor, or a tensor of an array, that can be saved without the memory around it."""
    import torch

    if not isinstance(value, torch.Tensor):
        return torch.from_numpy(sys.modules["numpy"].array(value))
    storage = value.untyped_storage().nbytes() if value.layout is torch.strided else 0
    is_view = storage > 2 * value.numel() * value.element_size()
    return (value.detach().clone().requires_grad_(value.requires_grad) if is_view else value).cpu()


def is_plain(value: Any) -> bool:
    """Return True for what ``torch.load(weights_only=True)`` loads: tensors, and plain data in plain containers."""
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    return is_tensor(value) or type(value) in (type(None), bool, int, float, complex, str, bytes)


def why(name: str, value: Any, error: Exception) -> str:
    """Return why a value cannot be saved, and what to do."""
    if "not the same object" in str(error):
        return f"`{name}` is of a class that a cell has defined again since: run the cell that makes `{name}` again"
    reason = pickling.explain(value, f"`{name}`", attempt=_attempt)
    if reason is None:
        return f"`{name}` cannot be saved for a script ({error}): {FIX}"
    what = reason.reason.replace("which cannot be sent to another process", "which cannot be saved for a script")
    return f"{reason.path}{what}: {FIX}"


def _attempt(value: Any) -> Exception | None:
    try:
        Survey(value)
    except Exception as error:  # noqa: BLE001  # a user's __reduce__ may raise anything
        return error
    return None
