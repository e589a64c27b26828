"""Fixtures of several files."""

from __future__ import annotations

import linecache
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from nblaunch.launch.frontend import register
from tests.unit.notebooks import Notebook

hypothesis.settings.register_profile("untimed", deadline=None)  # a test's time is the machine's
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    """A fake notebook, the host of launches for the time of a test."""
    opened = Notebook()
    register(opened)
    yield opened
    register(None)
    for filename in opened.labels:
        linecache.cache.pop(filename, None)


@pytest.fixture
def sparse_forgotten() -> Iterator[None]:
    """Forget the sparse tensors that the test unpickled.

    torch keeps every one until the thread's next torch.load, which checks them all and warns of that.
    """
    yield
    torch._utils._validate_loaded_sparse_tensors()
