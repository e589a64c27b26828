"""Headlines: one sentence for any error."""

from __future__ import annotations

import pytest

from nblaunch.launch.failures import RankTraceback, describe
from nblaunch.launch.headlines import MAX_HEADLINE, headline_of

WORKER = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/env/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/data.py", line 3, in __getitem__
    raise ValueError("bad image 17")
ValueError: bad image 17
"""
REMOTE = '\n"""\nTraceback (most recent call last):\n  File "a.py", line 1, in f\nfoo.BarError\n"""'
DDP = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss. You can enable unused parameter detection by "
    "passing the keyword argument `find_unused_parameters=True`.\nParameter indices: 0 1"
)
CUDA = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
PYDANTIC = "1 validation error for Config\nlr\n  Input should be a valid number [type=float_parsing]"


@pytest.mark.parametrize(
    ("type_name", "message", "headline", "has_details"),
    [
        ("ValueError", WORKER, "ValueError: bad image 17 (in DataLoader worker 0)", False),
        (
            "KeyError",
            WORKER.replace("ValueError", "KeyError"),
            "KeyError: bad image 17 (in DataLoader worker 0)",
            False,
        ),
        ("RemoteTraceback", REMOTE, "BarError", False),
        (
            "RuntimeError",
            DDP,
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
            True,
        ),
        ("AcceleratorError", CUDA, "AcceleratorError: CUDA error: device-side assert triggered", True),
        ("ValidationError", PYDANTIC, "ValidationError: 1 validation error for Config", True),
        (
            "BackendCompilerFailed",
            "backend='inductor' raised:\nValueError: bad\n\nSet TORCHDYNAMO_VERBOSE=1",
            "BackendCompilerFailed: backend='inductor' raised: ValueError: bad",
            True,
        ),
        ("StopIteration", "", "StopIteration", False),
        ("KeyError", "'x'", "KeyError: 'x'", False),
        ("ValueError", "lr must be > 0, e.g. 0.1", "ValueError: lr must be > 0, e.g. 0.1", False),
        ("AssertionError", "tensor([[1., 2.],\n        [3., 4.]])", "AssertionError: tensor([[1., 2.],", True),
    ],
)
def test_a_headline_is_the_sentence_that_matters(
    type_name: str, message: str, headline: str, has_details: bool
) -> None:
    found = headline_of(type_name, message)
    assert (str(found), bool(found.details)) == (headline, has_details)


@pytest.mark.parametrize("message", ["0.123, " * 10_000, "x" * 10_000, "Traceback (most recent call last):\n  cut"])
def test_a_headline_has_at_most_two_lines(message: str) -> None:
    found = headline_of("ValueError", message)
    assert len(found.text) <= MAX_HEADLINE
    assert "\n" not in found.text
    assert len(found.details) < 5000


def test_a_group_lists_its_exceptions() -> None:
    class Group(Exception):  # noqa: N818  # as ExceptionGroup, which Python 3.10 lacks
        exceptions = (ValueError("one"), OSError("two"))

    failure = describe(Group("workers (2 sub-exceptions)"), None)
    assert failure.headline == "The launch failed: Group: workers (2 sub-exceptions)"
    assert failure.details == "ValueError: one\nOSError: two"


def test_a_message_beside_its_traceback_keeps_its_advice() -> None:
    error = RuntimeError(DDP)
    error.__cause__ = RankTraceback(f"on rank 0:\nRuntimeError: {DDP}")
    assert "find_unused_parameters=True" in describe(error, None).details
