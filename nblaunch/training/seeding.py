"""Seeds: one call that makes a run repeatable, and seeds that are derived from others."""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from nblaunch.errors import ArgumentError

VARIABLE = "NBLAUNCH_SEED"
_LIMIT = 2**32
"""NumPy's seeds are below it."""


def seed_everything(seed: int, *, deterministic: bool = False) -> int:
    """Seed Python, NumPy and torch on all devices, and be the seed of every loader and sampler that is given none.

    Workers of a `nblaunch.training.data.shard`-ed loader take seeds of their own from it. On one machine, with the
    same versions and number of ranks, a run on the CPU is then bit-equal to the one before.

    Args:
        seed: From 0 to 2**32 - 1. Give every rank the same: loaders draw one order for all ranks from it.
        deterministic: Also let torch use deterministic algorithms alone (it raises where there is none, and is
            slower) and cuDNN no benchmarks: what GPUs need to repeat a run.

    Returns:
        The seed.

    Raises:
        ArgumentError: `seed` is no whole number in that range.
    """
    _check(seed, "seed")
    os.environ[VARIABLE] = str(seed)
    _seed_python_and_numpy(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for, or torch raises
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return seed


def seed_worker(worker_id: int) -> None:
    """Seed Python and NumPy in a DataLoader's worker from torch's seed there: ``worker_init_fn=seed_worker``.

    torch seeds its own generator in every worker, and from the loader's. Old versions leave NumPy's alike in all.
    """
    _seed_python_and_numpy(torch.initial_seed() % _LIMIT)


def default_seed() -> int:
    """What `seed_everything` was given, here or in the process that started this one; else 0.

    Raises:
        ArgumentError: The environment variable NBLAUNCH_SEED holds something else.
    """
    text = os.environ.get(VARIABLE, "0")
    if not (text.isascii() and text.isdigit() and int(text) < _LIMIT):
        raise ArgumentError(f"{VARIABLE}={text!r}: must be a whole number from 0 to 2**32 - 1: call seed_everything")
    return int(text)


def checked_seed(seed: int | None) -> int | None:
    """A `seed` argument as it was given.

    Raises:
        ArgumentError: It is neither None nor a whole number from 0 to 2**32 - 1.
    """
    if seed is not None:
        _check(seed, "seed")
    return seed


class Seeded(NamedTuple):
    """What a worker is asked for: unpickled there, it seeds the worker's generators and is `value` itself."""

    seed: int
    value: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded_value, tuple(self)


def _seeded_value(seed: int, value: Any) -> Any:
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: it would seed the GPUs too
    _seed_python_and_numpy(seed % _LIMIT)
    return value


def derived_seed(*numbers: int) -> int:
    """One seed, below 2**63, from several numbers; neighbours give unrelated seeds (BLAKE2b)."""
    text = ",".join(str(int(number)) for number in numbers)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derived_generator(*numbers: int) -> torch.Generator:
    """A generator on the CPU that is seeded from several numbers."""
    return torch.Generator().manual_seed(derived_seed(*numbers))


@contextmanager
def seeded(seed: int, *generators: torch.Generator) -> Iterator[None]:
    """Python's, NumPy's and torch's global generators, and these, begin at `seed`, and are afterwards as they were."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        for generator in (torch.default_generator, *generators):  # not torch.manual_seed: it would seed the GPUs too
            stack.callback(generator.set_state, generator.get_state())
            generator.manual_seed(seed)
        if "numpy" in sys.modules:
            stack.enter_context(_numpy_apart(sys.modules["numpy"]))
        _seed_python_and_numpy(seed % _LIMIT)
        yield


_spares: list[Any] = []
"""Bit generators that `_numpy_apart` does not use at the moment: to make one takes 0.4 ms."""


@contextmanager
def _numpy_apart(numpy: Any) -> Iterator[None]:
    """NumPy's global functions draw from a bit generator of their own, and go on with theirs afterwards.

    To copy the state of theirs and set it again would take 0.4 ms for every batch that is loaded.
    """
    if not hasattr(numpy.random, "set_bit_generator"):  # before NumPy 1.24
        state = numpy.random.get_state()
        try:
            yield
        finally:
            numpy.random.set_state(state)
        return
    own = numpy.random.get_bit_generator()
    beside = _Beside()
    with beside.in_place(numpy) as random_state:
        kept = random_state.get_state(legacy=False)
    spare = _spares.pop() if _spares else numpy.random.MT19937()
    numpy.random.set_bit_generator(spare)  # drops the spare Gaussian
    try:
        yield
    finally:
        numpy.random.set_bit_generator(own)
        with beside.in_place(numpy) as random_state:
            random_state.set_state(kept)
        _spares.append(spare)


class _Beside:
    """Stands in for NumPy's bit generator while only what the RandomState keeps beside it is read or set.

    That is the second of the last pair of normal numbers. `get_state` has no way to give it alone.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"bit_generator": type(self).__name__, "state": {}}

    @contextmanager
    def in_place(self, numpy: Any) -> Iterator[Any]:
        random_state = numpy.random.mtrand._rand
        own, random_state._bit_generator = random_state._bit_generator, self
        try:
            yield random_state
        finally:
            random_state._bit_generator = own


def _check(seed: Any, name: str) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _LIMIT:
        raise ArgumentError(f"{name}={seed!r}: must be a whole number from 0 to 2**32 - 1, such as {name}=42")


def _seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return  # torch works without it, and then nobody draws from it
    numpy.random.seed(seed)
