"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("untimed", deadline=None)  # a test's time is the machine's
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def sparse_forgotten() -> Iterator[None]:
    """Forget the sparse tensors that the test unpickled.

    torch keeps every one until the thread's next torch.load, which checks them all and warns of that.
    """
    yield
    torch._utils._validate_loaded_sparse_tensors()
