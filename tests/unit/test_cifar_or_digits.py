from __future__ import annotations

import gc
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

import cifar_or_digits
import mnist_or_digits
import numpy as np
import pytest
import torch
from cifar_or_digits import ColouredDigits
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import CIFAR10


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of these tests are on this machine, and nothing chooses the digits for them."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv(mnist_or_digits.SOURCE_VARIABLE, raising=False)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CIFAR-10's server refuses every connection: its port is bound, without a listener."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{bound.getsockname()[1]}/{CIFAR10.filename}")
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits, written once for the tests that only read them."""
    root = tmp_path_factory.mktemp("written")
    ColouredDigits(root, download=True)
    return root


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A server with a CIFAR-10 of four images in each file, packed as the real one; gives the archive."""
    archive = tmp_path / "served" / CIFAR10.filename
    archive.parent.mkdir()
    batch = pickle.dumps({"data": np.full((4, 3072), 7, np.uint8), "labels": [0, 1, 2, 3]}, protocol=2)
    contents = {name: batch for name, _ in CIFAR10.train_list + CIFAR10.test_list}
    contents[CIFAR10.meta["filename"]] = pickle.dumps({"label_names": ["airplane", "automobile", "bird", "cat"]})
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, md5[name]] for name, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5[CIFAR10.meta["filename"]]})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(archive.parent))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{CIFAR10.filename}")
        yield archive
        server.shutdown()
        thread.join()


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_torchvision_reads_the_digits(written: Path) -> None:
    train, test = ColouredDigits(written, train=True), ColouredDigits(written, train=False)

    assert (len(train), len(test)) == (1437, 360)
    assert train.data.shape == (1437, 32, 32, 3)
    assert train.data.dtype == np.uint8
    image, label = train[0]
    assert (image.size, image.mode, type(label)) == ((32, 32), "RGB", int)
    assert train.classes == cifar_or_digits.NAMES


def test_the_documents_transform_and_loader_take_them(written: Path) -> None:
    transform = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.ToTensor()])

    images, labels = next(iter(DataLoader(ColouredDigits(written, transform=transform), batch_size=8)))

    assert images.shape == (8, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64


def test_light_ink_on_dark_paper_in_colours(written: Path) -> None:
    data = ColouredDigits(written).data

    paper = data[:, :2].reshape(len(data), -1, 3)
    assert (paper == paper[:, :1]).all()  # an empty margin of one colour
    assert (data >= paper[:, :1, None]).all()
    assert len(np.unique(paper[:, 0], axis=0)) > 1400
    assert (data.max(axis=(1, 2)) >= 127).all()


def test_each_digit_has_its_share_of_the_test_set(written: Path) -> None:
    train, test = (np.bincount(ColouredDigits(written, train=train).targets) for train in (True, False))

    assert (abs(test / (train + test) - 0.2) < 0.01).all()


def test_no_image_is_in_both_sets(written: Path) -> None:
    train, test = ({image.tobytes() for image in ColouredDigits(written, train=flag).data} for flag in (True, False))

    assert len(train) == 1437
    assert not train & test


def test_the_digits_are_the_same_everywhere(written: Path, tmp_path: Path) -> None:
    ColouredDigits(tmp_path, download=True)

    assert files(tmp_path) == files(written)


def test_a_second_call_writes_nothing(offline: None, tmp_path: Path) -> None:
    kind, root = cifar_or_digits.prepare(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    assert cifar_or_digits.prepare(tmp_path) == (kind, root) == (ColouredDigits, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(b"other")])
@pytest.mark.parametrize("name", ["data_batch_3", "md5sums.txt"])
def test_missing_or_damaged_files_are_written_again(
    harm: Callable[[Path], object], name: str, written: Path, tmp_path: Path
) -> None:
    ColouredDigits(tmp_path, download=True)
    harm(tmp_path / ColouredDigits.base_folder / name)

    ColouredDigits(tmp_path, download=True)

    assert files(tmp_path) == files(written)


def test_harmed_files_are_not_read(tmp_path: Path) -> None:
    ColouredDigits(tmp_path, download=True)
    (tmp_path / ColouredDigits.base_folder / "test_batch").write_bytes(b"other")

    with pytest.raises(RuntimeError, match="not found or corrupted"):
        ColouredDigits(tmp_path)


def test_digits_never_pass_for_cifar(written: Path) -> None:
    with pytest.raises(RuntimeError, match="Dataset not found"):
        CIFAR10(written)


def test_nothing_is_there_until_all_of_it_is(tmp_path: Path) -> None:
    with cifar_or_digits._filled_in_one_go(tmp_path, "half") as scratch:
        (scratch / "half").mkdir()
        (scratch / "half" / "data_batch_1").write_bytes(b"")

    assert list(tmp_path.iterdir()) == []


def test_says_which_data_and_why(
    offline: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cifar_or_digits.prepare(tmp_path)
    without_network = capfd.readouterr()
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")
    cifar_or_digits.prepare(tmp_path)
    as_asked = capfd.readouterr()

    what = "Data: scikit-learn's handwritten digits, coloured, 1,437 training and 360 test images"
    assert without_network.out == f"{what} (CIFAR-10 cannot be downloaded here)\n"
    assert as_asked.out == f"{what} (as asked)\n"
    assert without_network.err == as_asked.err == ""


def test_downloads_cifar_once(small_cifar: Path, tmp_path: Path) -> None:
    first = cifar_or_digits.prepare(tmp_path / "data")
    small_cifar.unlink()

    assert cifar_or_digits.prepare(tmp_path / "data") == first == (CIFAR10, tmp_path / "data")
    assert len(CIFAR10(tmp_path / "data")) == 20
    assert [path.name for path in (tmp_path / "data").iterdir()] == [CIFAR10.base_folder]


def test_digits_as_asked_leave_the_network_alone(
    small_cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")

    kind, root = cifar_or_digits.prepare(tmp_path / "data")

    assert (kind, len(kind(root, train=False))) == (ColouredDigits, 360)


# torchvision keeps the refused reply in a cycle: collect it here, where its warning is known.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_download_that_fails_falls_back_and_leaves_nothing(
    small_cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_cifar.write_bytes(b"not what was promised")

    kind, root = cifar_or_digits.prepare(tmp_path / "data")

    assert kind is ColouredDigits
    assert [path.name for path in root.iterdir()] == [ColouredDigits.base_folder]
    output = capsys.readouterr()
    assert "CIFAR-10: the download failed" in output.out
    assert "Traceback" not in output.err
    gc.collect()


def test_an_unknown_source_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "mnist")

    with pytest.raises(ValueError, match='NBLAUNCH_QUICKSTART_DATA=\'mnist\': use "auto" or "digits"'):
        cifar_or_digits.prepare(tmp_path)
