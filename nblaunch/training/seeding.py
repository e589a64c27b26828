"""Seeds: `seed_everything` for a repeatable run, and seeds derived from others."""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from nblaunch.machine.arguments import whole_number
from nblaunch.training.topology import data_world, world

SEED_VARIABLE = "NBLAUNCH_SEED"
"""Set by `seed_everything`, for ranks that are launched later."""
_SEED_LIMIT = 2**32


def seed_everything(seed: int, *, deterministic: bool = False) -> int:
    """Seed Python, NumPy and torch on all devices, and set the default seed of loaders and samplers.

    Workers of a loader from `nblaunch.training.shard` derive their seeds from it. With the same machine, versions and
    number of ranks, runs on the CPU are then bit-identical.

    Args:
        seed: From 0 to 2**32 - 1, the same on every rank: all ranks derive one sample order from it.
        deterministic: Also use only deterministic algorithms (slower; operations without one raise) and disable cuDNN
            benchmarking. GPUs need it for reproducible runs.

    Returns:
        The seed.

    Raises:
        ArgumentError: `seed` is not an integer in that range.
    """
    seed = whole_number("seed", seed, least=0, most=_SEED_LIMIT - 1)
    os.environ[SEED_VARIABLE] = str(seed)
    seed_generators(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return seed


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, the latter on all devices; `seed` is below 2**63."""
    _seed_python_and_numpy(seed % _SEED_LIMIT)
    torch.manual_seed(seed)


def seed_worker(worker_id: int) -> None:
    """Seed Python and NumPy in a DataLoader worker from torch's seed: ``worker_init_fn=seed_worker``.

    torch seeds its own generator in every worker. In old versions NumPy's is the same in all workers.
    """
    _seed_python_and_numpy(torch.initial_seed() % _SEED_LIMIT)


def default_seed() -> int:
    """Return the seed of `seed_everything`, called here or in the process that started this one; else 0."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def order_seed(generators: Sequence[torch.Generator]) -> int:
    """Return the seed of an order of samples that comes from the first of these generators, or from torch's global one.

    The generator is not advanced. A seed beyond 32 bits is hashed to one within. Where torch has chosen its own seed,
    which has more than 32 bits, the seed of `seed_everything` in the process that started this one counts.
    """
    seed = generators[0].initial_seed() if generators else torch.initial_seed()
    if seed < _SEED_LIMIT:
        return seed
    return default_seed() if not generators and SEED_VARIABLE in os.environ else derived_seed(seed) % _SEED_LIMIT


def checked_seed(seed: int | None) -> int | None:
    return None if seed is None else whole_number("seed", seed, least=0, most=_SEED_LIMIT - 1)


class Seeded(NamedTuple):
    """A request to a worker that unpickles to `value` and seeds the worker's generators."""

    seed: int
    value: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded_value, tuple(self)


def _seeded_value(seed: int, value: Any) -> Any:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
    _seed_python_and_numpy(seed % _SEED_LIMIT)
    return value


def derived_seed(*numbers: int) -> int:
    """Hash several numbers to a seed below 2**63 (BLAKE2b): neighbouring numbers give unrelated seeds."""
    text = ",".join(str(int(number)) for number in numbers)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derived_generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(*numbers))


@contextmanager
def seeded(seed: int, *generators: torch.Generator) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's global generators, and `generators`; restore their states on exit."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        for generator in (torch.default_generator, *generators):  # torch.manual_seed would seed GPUs too
            stack.callback(generator.set_state, generator.get_state())
            generator.manual_seed(seed)
        if "numpy" in sys.modules:
            numpys: Any = sys.modules["numpy"].random
            stack.callback(numpys.set_state, numpys.get_state(legacy=False))
        _seed_python_and_numpy(seed % _SEED_LIMIT)
        yield


def random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # asking whether it is available would start the driver
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def resume_random_states(by_rank: Sequence[Mapping[str, Any]], before: int, copies: int) -> None:
    """Restore this rank's states; a rank that did not exist gets states derived from rank 0's.

    Ranks of one tensor group must draw the same numbers: if the groups have another size now, each is one rank.
    """
    groups, part = by_rank[::before], data_world(copies).rank
    if (len(by_rank), before) == (world().size, copies):
        restore_random_states(by_rank[world().rank])
    elif part < len(groups):
        restore_random_states(groups[part])
    else:
        digest = hashlib.blake2b(bytes(groups[0]["torch"].tolist()), digest_size=8).digest()
        seed_generators(derived_seed(int.from_bytes(digest, "big"), part))


def _seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return  # optional
    numpy.random.seed(seed)
