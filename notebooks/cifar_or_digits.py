"""CIFAR-10 where it can be downloaded, else scikit-learn's handwritten digits, coloured, in the same file format.

The notebook calls `prepare` once, before it launches anything, so no rank ever downloads. It gives the class to read
with: torchvision's own ``CIFAR10``, or a subclass that differs in its folder and checksums only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mnist_or_digits
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torchvision.datasets import CIFAR10

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_CHECKSUMS = "md5sums.txt"


class ColouredDigits(CIFAR10):  # type: ignore[misc]  # torchvision ships no types
    """The digits, read by torchvision's own code; the files' MD5 checksums stand beside them.

    Scikit-learn's 1,797 images of 8×8 pixels, enlarged to 32×32, each in two colours of its own.

    Args:
        root: As `prepare` gives it.
        train: The 1,437 training images, else the 360 test images.
        transform: As for ``CIFAR10``.
        target_transform: As for ``CIFAR10``.
        download: Write what is missing.

    Raises:
        RuntimeError: The files are not there, or not whole.
    """

    base_folder = "digits-batches-py"

    def __init__(self, root: str | os.PathLike[str], train: bool = True, *args: Any, **more: Any) -> None:
        self._read_checksums(Path(root))
        super().__init__(root, train, *args, **more)

    def download(self) -> None:
        if not self._check_integrity():
            _write_digits(Path(self.root))
            self._read_checksums(Path(self.root))

    def _read_checksums(self, root: Path) -> None:
        file = root / self.base_folder / _CHECKSUMS
        lines = file.read_text().splitlines() if file.is_file() else []
        sums = {name: md5 for md5, name in (line.split() for line in lines if len(line.split()) == 2)}
        self.train_list, self.test_list = (
            [[name, sums.get(name, "missing")] for name, _ in files]
            for files in (CIFAR10.train_list, CIFAR10.test_list)
        )
        self.meta = {**CIFAR10.meta, "md5": sums.get(CIFAR10.meta["filename"], "missing")}


def prepare(folder: str | os.PathLike[str] = "data") -> tuple[type[CIFAR10], Path]:
    """Make one of the two datasets ready, say which in one printed line, and return what reads it.

    Each dataset has a folder of its own, so the digits never pass for CIFAR-10. What is already there is used as
    it is. Without a network it takes a few seconds at most.

    Args:
        folder: Where to keep the data; made where it is missing.

    Returns:
        The class and its ``root``: ``kind(root, train=True)`` gives 32×32 colour images of ten classes.

    Raises:
        ValueError: The environment variable ``NBLAUNCH_QUICKSTART_DATA`` is neither ``auto`` (the default)
            nor ``digits`` (never look for the network).
    """
    source = os.environ.get(mnist_or_digits.SOURCE_VARIABLE, "auto")
    if source not in ("auto", "digits"):
        raise ValueError(f'{mnist_or_digits.SOURCE_VARIABLE}={source!r}: use "auto" or "digits"')
    root = Path(folder)
    if source == "auto" and _have_cifar(root):
        print("Data: CIFAR-10, 50,000 training and 10,000 test images")
        return CIFAR10, root
    ColouredDigits(root, download=True)
    why = "as asked" if source == "digits" else "CIFAR-10 cannot be downloaded here"
    print(f"Data: scikit-learn's handwritten digits, coloured, 1,437 training and 360 test images ({why})")
    return ColouredDigits, root


def _have_cifar(root: Path) -> bool:
    if (root / CIFAR10.base_folder).is_dir():  # it is moved there only when it is whole
        return True
    if not mnist_or_digits._answers(CIFAR10.url):
        return False
    with _filled_in_one_go(root, CIFAR10.base_folder) as scratch, mnist_or_digits._stalls_end():
        try:
            CIFAR10(scratch, download=True)
        except (OSError, RuntimeError, tarfile.TarError) as error:  # a refusal, a stall, another file than promised
            print(f"CIFAR-10: the download failed ({str(error).splitlines()[0]})")
            return False
    return True


@contextlib.contextmanager
def _filled_in_one_go(root: Path, folder: str) -> Iterator[Path]:
    """Give a scratch root; its `folder` replaces the real one, whole, if the block ends and every file is there."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".part-") as scratch:
        yield Path(scratch)
        filled, names = Path(scratch) / folder, [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
        if all((filled / name).is_file() for name in [*names, CIFAR10.meta["filename"]]):
            with contextlib.suppress(FileNotFoundError):
                (root / folder).rename(Path(scratch) / "before")
            filled.rename(root / folder)


def _write_digits(root: Path) -> None:
    from sklearn.datasets import load_digits  # only here: most of a second
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        _colour(torch.from_numpy(digits.images)),
        digits.target,
        test_size=mnist_or_digits.DIGITS_IN_TEST_SET,
        stratify=digits.target,
        random_state=0,
    )
    parts = len(CIFAR10.train_list)
    batches = [
        *zip(np.array_split(train_images, parts), np.array_split(train_labels, parts), strict=True),
        (test_images, test_labels),
    ]
    with _filled_in_one_go(root, ColouredDigits.base_folder) as scratch:
        folder = scratch / ColouredDigits.base_folder
        folder.mkdir()
        for (name, _), (images, labels) in zip(CIFAR10.train_list + CIFAR10.test_list, batches, strict=True):
            _write(folder / name, {"data": images.reshape(len(images), -1), "labels": labels.tolist()})
        _write(folder / CIFAR10.meta["filename"], {CIFAR10.meta["key"]: NAMES})
        sums = [f"{hashlib.md5(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
        (folder / _CHECKSUMS).write_text("".join(sums))


def _write(file: Path, content: dict[str, Any]) -> None:
    """CIFAR-10's file format, https://www.cs.toronto.edu/~kriz/cifar.html: a pickled dict."""
    file.write_bytes(pickle.dumps(content, protocol=2))


def _colour(images: torch.Tensor) -> NDArray[np.uint8]:
    """From float (n, 8, 8) in 0..16 to uint8 (n, 3, 32, 32): light ink on dark paper, in colours drawn for each."""
    drawn = F.interpolate(images.unsqueeze(1) / 16, scale_factor=3.5, mode="bicubic", align_corners=False)
    ink = F.pad(drawn.clamp(0, 1), (2, 2, 2, 2))  # bicubic overshoots at sharp edges
    draws = torch.Generator().manual_seed(0)
    dark, light = (torch.rand(2, len(images), 3, 1, 1, generator=draws, dtype=images.dtype) / 2).unbind()
    return (255 * (dark + (0.5 + light - dark) * ink)).round().to(torch.uint8).numpy()
