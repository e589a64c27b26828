"""MNIST where it can be downloaded, else scikit-learn's handwritten digits in the same file format.

The notebook calls `prepare` once, before it launches anything, so no rank ever downloads. Either way the
very same `torchvision.datasets.MNIST(root, train=...)` reads what is there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torchvision.datasets import MNIST

SOURCE_VARIABLE = "NBLAUNCH_QUICKSTART_DATA"
PROBE_SECONDS = 3.0
STALL_SECONDS = 10.0
DIGITS_IN_TEST_SET = 360  # a fifth of 1,797


def prepare(folder: str | os.PathLike[str] = "data") -> Path:
    """Make one of the two datasets ready, say which in one printed line, and return the root to read it from.

    Each dataset has a root of its own, so the digits never pass for MNIST. What is already there is used as
    it is. Without a network it takes a few seconds at most.

    Args:
        folder: Where to keep the data; made where it is missing.

    Returns:
        The ``root`` for ``datasets.MNIST(root, train=True)`` and ``datasets.MNIST(root, train=False)``.

    Raises:
        ValueError: The environment variable ``NBLAUNCH_QUICKSTART_DATA`` is neither ``auto`` (the default)
            nor ``digits`` (never look for the network).
    """
    source = os.environ.get(SOURCE_VARIABLE, "auto")
    if source not in ("auto", "digits"):
        raise ValueError(f'{SOURCE_VARIABLE}={source!r}: use "auto" or "digits"')
    root = Path(folder)
    if source == "auto" and _have_mnist(root):
        print("Data: MNIST, 60,000 training and 10,000 test images")
        return root
    root /= "digits"
    if not _readable(root):
        _write_digits(root)
    why = "as asked" if source == "digits" else "MNIST cannot be downloaded here"
    print(f"Data: scikit-learn's handwritten digits, 1,437 training and 360 test images ({why})")
    return root


def _readable(root: Path) -> bool:
    """Whether MNIST's four files are there, each of them whole: they are moved in only when complete."""
    return all((_raw(root) / name).is_file() for name in _file_names())


def _raw(root: Path) -> Path:
    return root / "MNIST" / "raw"  # where torchvision looks


def _file_names() -> list[str]:
    return [name.removesuffix(".gz") for name, _ in MNIST.resources]


def _have_mnist(root: Path) -> bool:
    if _readable(root):
        return True
    if not _answers(MNIST.mirrors[0] + MNIST.resources[0][0]):
        return False
    with _filled_in_one_go(root) as scratch, _stalls_end():
        try:
            MNIST(scratch, download=True)
        except (OSError, RuntimeError) as error:  # a mirror's refusal, a stall, a checksum that does not match
            print(f"MNIST: the download failed ({str(error).splitlines()[0]})")
            return False
    return True


def _answers(url: str) -> bool:
    """Whether the server has the file, asked in a thread: a name lookup ignores every timeout."""
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=PROBE_SECONDS):
            answered.set()

    thread = threading.Thread(target=ask, name="mnist-probe", daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 0.5)
    return answered.is_set()


@contextlib.contextmanager
def _stalls_end() -> Iterator[None]:
    """End a transfer that stalls: torchvision opens its URLs without a timeout."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _filled_in_one_go(root: Path) -> Iterator[Path]:
    """Give a scratch root; its files move to the real one, whole, if all four are there at the end."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".part-") as scratch:
        yield Path(scratch)
        if _readable(Path(scratch)):
            _raw(root).mkdir(parents=True, exist_ok=True)
            for name in _file_names():
                os.replace(_raw(Path(scratch)) / name, _raw(root) / name)


def _write_digits(root: Path) -> None:
    from sklearn.datasets import load_digits  # only here: most of a second
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = _enlarge(torch.from_numpy(digits.images))
    labels = digits.target.astype(np.uint8)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=DIGITS_IN_TEST_SET, stratify=labels, random_state=0
    )
    with _filled_in_one_go(root) as scratch:
        _raw(scratch).mkdir(parents=True)
        for name, array in zip(_file_names(), (train_images, train_labels, test_images, test_labels), strict=True):
            (_raw(scratch) / name).write_bytes(_idx(array))


def _enlarge(images: torch.Tensor) -> NDArray[np.uint8]:
    """From float (n, 8, 8) in 0..16 to uint8 (n, 28, 28) in 0..255: bright ink and an empty margin, as in MNIST."""
    drawn = F.interpolate(images.unsqueeze(1) * (255 / 16), scale_factor=3, mode="bicubic", align_corners=False)
    framed = F.pad(drawn.clamp(0, 255), (2, 2, 2, 2))  # bicubic overshoots at sharp edges
    return framed.squeeze(1).round().to(torch.uint8).numpy()


def _idx(array: NDArray[np.uint8]) -> bytes:
    """MNIST's file format: a magic number (type 8 is uint8, then the rank), the sizes, the values, big-endian.

    http://yann.lecun.com/exdb/mnist/ describes it.
    """
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
