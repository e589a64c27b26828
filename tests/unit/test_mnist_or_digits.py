from __future__ import annotations

import gc
import gzip
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mnist_or_digits
import numpy as np
import pytest
import torch
from torchvision.datasets import MNIST

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of these tests are on this machine, and nothing chooses the digits for them."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv(mnist_or_digits.SOURCE_VARIABLE, raising=False)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MNIST's mirror refuses every connection: its port is bound, without a listener."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{bound.getsockname()[1]}/"])
        yield


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A mirror that serves the folder it gives."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        yield folder
        server.shutdown()
        thread.join()


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch, mirror: Path) -> Path:
    """Puts four small files on the mirror, named and compressed as MNIST's are."""
    images, labels = np.full((5, 28, 28), 7, np.uint8), np.arange(5, dtype=np.uint8)
    resources = []
    for (name, _), array in zip(MNIST.resources, (images, labels, images, labels), strict=True):
        content = gzip.compress(mnist_or_digits._idx(array))
        (mirror / name).write_bytes(content)
        resources.append((name, hashlib.md5(content).hexdigest()))
    monkeypatch.setattr(MNIST, "resources", resources)
    return mirror


def files(root: Path) -> Files:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_torchvision_reads_the_digits(offline: None, tmp_path: Path) -> None:
    root = mnist_or_digits.prepare(tmp_path)

    train, test = MNIST(root, train=True), MNIST(root, train=False)

    assert (len(train), len(test)) == (1437, 360)
    assert train.data.shape == (1437, 28, 28)
    assert train.data.dtype == torch.uint8
    image, label = train[0]
    assert (image.size, image.mode, type(label)) == ((28, 28), "L", int)


def test_digits_are_bright_ink_in_an_empty_margin(offline: None, tmp_path: Path) -> None:
    data = MNIST(mnist_or_digits.prepare(tmp_path), train=True).data

    assert data[:, :2].max() == data[:, -2:].max() == data[:, :, :2].max() == data[:, :, -2:].max() == 0
    assert data.max() == 255
    assert 0.1 < data.float().mean() / 255 < 0.35  # MNIST's own mean is 0.13


def test_each_digit_has_its_share_of_the_test_set(offline: None, tmp_path: Path) -> None:
    root = mnist_or_digits.prepare(tmp_path)

    counts = [MNIST(root, train=train).targets.bincount(minlength=10) for train in (True, False)]

    assert ((counts[1] / (counts[0] + counts[1]) - 0.2).abs() < 0.01).all()


def test_no_image_is_in_both_sets(offline: None, tmp_path: Path) -> None:
    root = mnist_or_digits.prepare(tmp_path)

    train, test = ({image.tobytes() for image in MNIST(root, train=train).data.numpy()} for train in (True, False))

    assert len(train) == 1437
    assert not train & test


def test_the_digits_are_the_same_everywhere(offline: None, tmp_path: Path) -> None:
    first = mnist_or_digits.prepare(tmp_path / "first")
    second = mnist_or_digits.prepare(tmp_path / "second")

    assert files(first) == files(second)


def test_a_second_call_writes_nothing(offline: None, tmp_path: Path) -> None:
    root = mnist_or_digits.prepare(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    assert mnist_or_digits.prepare(tmp_path) == root
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_missing_file_is_written_again(offline: None, tmp_path: Path) -> None:
    root = mnist_or_digits.prepare(tmp_path)
    whole = files(root)
    (root / "MNIST" / "raw" / "train-labels-idx1-ubyte").unlink()

    mnist_or_digits.prepare(tmp_path)

    assert files(root) == whole


def test_digits_never_pass_for_mnist(offline: None, tmp_path: Path) -> None:
    mnist_or_digits.prepare(tmp_path)

    with pytest.raises(RuntimeError, match="Dataset not found"):
        MNIST(tmp_path)


def test_nothing_is_there_until_all_of_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), mnist_or_digits._filled_in_one_go(tmp_path) as scratch:  # noqa: PT012 (that is the case)
        (scratch / "half").write_bytes(b"")
        raise ZeroDivisionError

    assert list(tmp_path.iterdir()) == []


def test_says_which_data_and_why(
    offline: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist_or_digits.prepare(tmp_path)
    without_network = capfd.readouterr()
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")
    mnist_or_digits.prepare(tmp_path)
    as_asked = capfd.readouterr()

    sizes = "1,437 training and 360 test images"
    assert without_network.out == (
        f"Data: scikit-learn's handwritten digits, {sizes} (MNIST cannot be downloaded here)\n"
    )
    assert as_asked.out == f"Data: scikit-learn's handwritten digits, {sizes} (as asked)\n"
    assert without_network.err == as_asked.err == ""


def test_downloads_mnist_once(small_mnist: Path, tmp_path: Path) -> None:
    root = mnist_or_digits.prepare(tmp_path / "data")
    for file in small_mnist.iterdir():
        file.unlink()

    assert root == mnist_or_digits.prepare(tmp_path / "data") == tmp_path / "data"
    assert len(MNIST(root, train=False)) == 5
    assert [path.name for path in root.iterdir()] == ["MNIST"]


def test_digits_as_asked_leave_the_network_alone(
    small_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")

    assert len(MNIST(mnist_or_digits.prepare(tmp_path))) == 1437


def _drop_last(mirror: Path) -> None:
    (mirror / MNIST.resources[-1][0]).unlink()


def _damage(mirror: Path) -> None:
    (mirror / MNIST.resources[-1][0]).write_bytes(b"not what was promised")


# torchvision keeps the refused reply in a cycle: collect it here, where its warning is known.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("harm", [_drop_last, _damage])
def test_a_download_that_fails_falls_back_and_leaves_nothing(
    harm: Callable[[Path], None], small_mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(small_mnist)

    root = mnist_or_digits.prepare(tmp_path / "data")

    assert len(MNIST(root)) == 1437
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["digits"]
    output = capsys.readouterr()
    assert "MNIST: the download failed" in output.out
    assert "Traceback" not in output.err
    gc.collect()


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mnist_or_digits, "PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        start = time.monotonic()
        answered = mnist_or_digits._answers(MNIST.mirrors[0])

    assert not answered
    assert time.monotonic() - start < 60


def test_a_transfer_that_stalls_is_given_up_and_the_timeout_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist_or_digits, "STALL_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with mnist_or_digits._stalls_end(), socket.create_connection(silent.getsockname()) as client:
            with pytest.raises(TimeoutError, match="timed out"):
                client.recv(1)

    assert socket.getdefaulttimeout() is None


def test_an_unknown_source_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "cifar")

    with pytest.raises(ValueError, match='NBLAUNCH_QUICKSTART_DATA=\'cifar\': use "auto" or "digits"'):
        mnist_or_digits.prepare(tmp_path)
