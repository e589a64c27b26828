"""MNIST and CIFAR-10 where they can be downloaded, else scikit-learn's digits in the same file formats."""

from __future__ import annotations

import gc
import gzip
import hashlib
import io
import pickle
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cifar_or_digits
import mnist_or_digits
import numpy as np
import pytest
import torch
from cifar_or_digits import ColouredDigits
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import CIFAR10, MNIST


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class OfMnist:
    name, what, count, folder, other = "MNIST", "", 5, "MNIST", "cifar"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def prepare(self, folder: Path) -> tuple[Any, Path]:
        return MNIST, mnist_or_digits.prepare(folder)

    def is_at(self, address: str) -> None:
        self._monkeypatch.setattr(MNIST, "mirrors", [f"http://{address}/"])

    def serve(self, folder: Path) -> None:
        """Write four small files, named and compressed as MNIST's are."""
        images, labels = np.full((5, 28, 28), 7, np.uint8), np.arange(5, dtype=np.uint8)
        resources = []
        for (name, _), array in zip(MNIST.resources, (images, labels, images, labels), strict=True):
            content = gzip.compress(mnist_or_digits._idx(array))
            (folder / name).write_bytes(content)
            resources.append((name, hashlib.md5(content).hexdigest()))
        self._monkeypatch.setattr(MNIST, "resources", resources)


class OfCifar:
    name, what, count, folder, other = "CIFAR-10", ", coloured", 20, CIFAR10.base_folder, "mnist"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def prepare(self, folder: Path) -> tuple[Any, Path]:
        return cifar_or_digits.prepare(folder)

    def is_at(self, address: str) -> None:
        self._monkeypatch.setattr(CIFAR10, "url", f"http://{address}/{CIFAR10.filename}")

    def serve(self, folder: Path) -> None:
        """Write an archive with four images in each file, packed as the real one."""
        archive = folder / CIFAR10.filename
        batch = pickle.dumps({"data": np.full((4, 3072), 7, np.uint8), "labels": [0, 1, 2, 3]}, protocol=2)
        contents = {name: batch for name, _ in CIFAR10.train_list + CIFAR10.test_list}
        contents[CIFAR10.meta["filename"]] = pickle.dumps({"label_names": ["airplane", "automobile", "bird", "cat"]})
        with tarfile.open(archive, "w:gz") as tar:
            for name, content in contents.items():
                member = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        md5 = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
        setattr_ = self._monkeypatch.setattr
        setattr_(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
        setattr_(CIFAR10, "train_list", [[name, md5[name]] for name, _ in CIFAR10.train_list])
        setattr_(CIFAR10, "test_list", [[name, md5[name]] for name, _ in CIFAR10.test_list])
        setattr_(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5[CIFAR10.meta["filename"]]})


@pytest.fixture(params=[OfMnist, OfCifar])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data set whose server refuses every connection. Nothing chooses the digits."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv(mnist_or_digits.SOURCE_VARIABLE, raising=False)
    made = request.param(monkeypatch)
    made.is_at("127.0.0.1:1")
    return made


@pytest.fixture
def served(source: Any, tmp_path: Path) -> Iterator[Path]:
    """The folder of a server that has a small data set."""
    folder = tmp_path / "served"
    folder.mkdir()
    source.serve(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        source.is_at(f"127.0.0.1:{server.server_port}")
        yield folder
        server.shutdown()
        thread.join()


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ------------------------------------------------------------------ the digits
def test_digits_are_read_by_torchvision_and_divided_evenly(source: Any, tmp_path: Path) -> None:
    kind, root = source.prepare(tmp_path)
    train, test = kind(root, train=True), kind(root, train=False)
    image, label = train[0]
    assert (image.size, image.mode) == (((32, 32), "RGB") if source.name == "CIFAR-10" else ((28, 28), "L"))
    assert type(label) is int
    sets = [{np.asarray(image).tobytes() for image in each.data} for each in (train, test)]
    assert [*map(len, sets)] == [len(train), len(test)] == [1437, 360]
    assert not sets[0] & sets[1]
    counts = [np.bincount(each.targets, minlength=10) for each in (train, test)]
    assert (abs(counts[1] / (counts[0] + counts[1]) - 0.2) < 0.01).all()


def test_digits_are_bright_ink_in_an_empty_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mnist_or_digits.SOURCE_VARIABLE, "digits")
    data = MNIST(mnist_or_digits.prepare(tmp_path), train=True).data
    assert data[:, :2].max() == data[:, -2:].max() == data[:, :, :2].max() == data[:, :, -2:].max() == 0
    assert data.max() == 255
    assert 0.1 < data.float().mean() / 255 < 0.35  # MNIST's own mean is 0.13
    coloured = ColouredDigits(tmp_path, download=True).data
    paper = coloured[:, :2].reshape(len(coloured), -1, 3)
    assert (paper == paper[:, :1]).all()  # an empty margin of one colour
    assert (coloured >= paper[:, :1, None]).all()
    assert len(np.unique(paper[:, 0], axis=0)) > 1400


def test_the_documents_transform_and_loader_take_them(tmp_path: Path) -> None:
    transform = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.ToTensor()])
    digits = ColouredDigits(tmp_path, transform=transform, download=True)
    images, labels = next(iter(DataLoader(digits, batch_size=8)))
    assert images.shape == (8, 3, 32, 32)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert digits.classes == cifar_or_digits.NAMES


def test_digits_are_the_same_everywhere_and_written_once(source: Any, tmp_path: Path) -> None:
    _, root = source.prepare(tmp_path / "first")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert source.prepare(tmp_path / "first")[1] == root
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert files(source.prepare(tmp_path / "second")[1]) == files(root)


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(b"other")])
@pytest.mark.parametrize("name", ["data_batch_3", "md5sums.txt"])
def test_missing_or_damaged_files_are_written_again(harm: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    ColouredDigits(tmp_path, download=True)
    whole = files(tmp_path)
    harm(tmp_path / ColouredDigits.base_folder / name)
    with pytest.raises(RuntimeError, match="not found or corrupted"):
        ColouredDigits(tmp_path)
    ColouredDigits(tmp_path, download=True)
    assert files(tmp_path) == whole


def test_a_missing_file_of_mnists_format_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mnist_or_digits.SOURCE_VARIABLE, "digits")
    root = mnist_or_digits.prepare(tmp_path)
    whole = files(root)
    (root / "MNIST" / "raw" / "train-labels-idx1-ubyte").unlink()
    mnist_or_digits.prepare(tmp_path)
    assert files(root) == whole


def test_digits_never_pass_for_the_real_data(source: Any, tmp_path: Path) -> None:
    source.prepare(tmp_path)
    with pytest.raises(RuntimeError, match="Dataset not found"):
        (MNIST if source.name == "MNIST" else CIFAR10)(tmp_path)


def test_nothing_is_there_until_all_of_it_is(tmp_path: Path) -> None:
    with cifar_or_digits._filled_in_one_go(tmp_path, "half") as scratch:
        (scratch / "half").mkdir()
        (scratch / "half" / "data_batch_1").write_bytes(b"")
    with pytest.raises(ZeroDivisionError), mnist_or_digits._filled_in_one_go(tmp_path) as scratch:  # noqa: PT012 (that is the case)
        (scratch / "half").write_bytes(b"")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ which data
def test_says_which_data_and_why(
    source: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    what = f"Data: scikit-learn's handwritten digits{source.what}, 1,437 training and 360 test images"
    source.prepare(tmp_path)
    assert capfd.readouterr() == (f"{what} ({source.name} cannot be downloaded here)\n", "")
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")
    source.prepare(tmp_path)
    assert capfd.readouterr() == (f"{what} (as asked)\n", "")
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", source.other)
    with pytest.raises(ValueError, match=f'NBLAUNCH_QUICKSTART_DATA=\'{source.other}\': use "auto" or "digits"'):
        source.prepare(tmp_path)


def test_real_data_is_downloaded_once(source: Any, served: Path, tmp_path: Path) -> None:
    kind, root = source.prepare(tmp_path / "data")
    for file in served.iterdir():
        file.unlink()
    assert source.prepare(tmp_path / "data") == (kind, root) == (kind, tmp_path / "data")
    assert len(kind(root)) == source.count
    assert [path.name for path in root.iterdir()] == [source.folder]


def test_digits_as_asked_leave_the_network_alone(
    source: Any, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")
    kind, root = source.prepare(tmp_path / "data")
    assert len(kind(root)) == 1437


# torchvision keeps the refused reply in a cycle: collect it here, where its warning is known.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(b"not what was promised")])
def test_a_download_that_fails_falls_back_and_leaves_nothing(
    harm: Callable[[Path], object], source: Any, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(max(served.iterdir()))
    kind, root = source.prepare(tmp_path / "data")
    assert len(kind(root)) == 1437
    assert len([*(tmp_path / "data").iterdir()]) == 1
    output = capsys.readouterr()
    if len([*served.iterdir()]) > 0:  # else the server said at once that it has no file
        assert f"{source.name}: the download failed" in output.out
    assert "Traceback" not in output.err
    gc.collect()


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist_or_digits, "PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not mnist_or_digits._answers(f"http://127.0.0.1:{silent.getsockname()[1]}/")


def test_a_transfer_that_stalls_is_given_up_and_the_timeout_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist_or_digits, "STALL_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with mnist_or_digits._stalls_end(), socket.create_connection(silent.getsockname()) as client:
            with pytest.raises(TimeoutError, match="timed out"):
                client.recv(1)
    assert socket.getdefaulttimeout() is None
