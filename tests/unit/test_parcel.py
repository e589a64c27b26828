"""Parcels: values and aliasing survive, large buffers are copied once, the sender's memory is safe."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.errors import PayloadError
from nblaunch.launch.attached import parcels_in, store_parcel
from nblaunch.machine import segments
from nblaunch.machine.segments import NoRoomError, Region
from nblaunch.transfer import tensors
from nblaunch.transfer.parcel import Outgoing, Parcel, pack, unpack
from tests.conftest import LONG

MB = 1 << 20
LARGE = 8 * tensors.MIN_BUFFER_BYTES
"""Elements of a tensor or array that stands outside the pickle, whatever its dtype."""


def packed(value: Any, parts: dict[str, Any] | None = None) -> Parcel:
    return pack(lambda found: value, parts)


def received(outgoing: Parcel) -> Any:
    """What a receiver of the parcel gets, which is closed."""
    try:
        return unpack([os.dup(fd) for fd in outgoing.fds])
    finally:
        outgoing.close()


def sent(value: Any) -> Any:
    return received(packed(value))


def printed(code: str) -> list[str]:
    """The words that a process of its own prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONG).stdout.split()


def large(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(LARGE).to(dtype)


# ------------------------------------------------------------------ tensors
@pytest.mark.parametrize(
    "make",
    [
        large,
        lambda: large(torch.bfloat16),
        lambda: torch.complex(large(), large()),
        lambda: large().view(4, -1).t(),
        lambda: large()[3::7],
        lambda: large().view(8, -1)[:, 2:5],
        lambda: torch.tensor(3.0),
        lambda: torch.empty(0),
        lambda: torch.empty(0).share_memory_(),
        lambda: torch.empty(0, 3, 0),
        lambda: torch.zeros(1).expand(100_000),
        lambda: torch.complex(large(), large()).conj(),
        lambda: large().requires_grad_(),
        lambda: nn.Parameter(large(), requires_grad=False),
        lambda: torch.eye(300).to_sparse(),
        lambda: torch.eye(300).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(large(), 0.1, 3, torch.qint8),
        lambda: torch.nested.nested_tensor([large(), large()[:5]]),
        lambda: torch.ones(100_000, dtype=torch.bool),
        lambda: torch.empty(30, device="meta"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors|.*Sparse|.*quantiz|TypedStorage::")  # torch's own, of prototypes
@pytest.mark.usefixtures("sparse_forgotten")
def test_tensors_of_every_kind_arrive_as_they_were(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    arrived = sent(tensor)
    assert type(arrived) is type(tensor)
    assert_alike(arrived, tensor)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", [4, LARGE])
def test_tensors_of_new_dtypes_arrive(dtype: torch.dtype, size: int) -> None:
    whole = torch.arange(size).to(dtype)
    its, parameter = sent([whole[2:], nn.Parameter(whole, requires_grad=False)])
    assert (its.dtype, its.stride(), its.storage_offset()) == (dtype, (1,), 2)
    assert torch.equal(parameter.view(torch.uint8), whole.view(torch.uint8))
    parameter.zero_()
    assert not its.view(torch.uint8).any()


def assert_alike(arrived: torch.Tensor, tensor: torch.Tensor) -> None:
    assert (arrived.dtype, arrived.device, arrived.layout) == (tensor.dtype, tensor.device, tensor.layout)
    assert (arrived.requires_grad, arrived.is_conj()) == (tensor.requires_grad, tensor.is_conj())
    if tensor.is_nested:
        for one, other in zip(arrived.unbind(), tensor.unbind(), strict=True):
            assert_alike(one, other)
        return
    assert arrived.shape == tensor.shape
    if tensor.layout == torch.strided:
        assert arrived.stride() == tensor.stride()
        assert arrived.storage_offset() in (tensor.storage_offset(), 0)  # of a large storage a part arrives
    if tensor.device.type != "meta":
        assert torch.equal(plain(arrived), plain(tensor))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its values, of whatever kind it is."""
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


class Tagged(torch.Tensor):
    """A subclass, with an attribute."""


def test_a_subclass_arrives_by_torchs_own_way() -> None:
    tensor = large().as_subclass(Tagged)
    tensor.tag = "mine"  # type: ignore[attr-defined]
    arrived = sent(tensor)
    assert type(arrived) is Tagged
    assert arrived.tag == "mine"  # type: ignore[attr-defined]
    assert torch.equal(arrived, tensor)


@pytest.mark.parametrize("size", [10, 1000])
def test_tied_weights_stay_tied(size: int) -> None:
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    model[1].weight = model[0].weight
    arrived = sent(model)
    assert arrived[1].weight is arrived[0].weight
    assert_same(arrived[0].weight, model[0].weight)


def test_small_storages_can_be_resized() -> None:
    assert sent(torch.ones(3)).resize_(1000).shape == (1000,)


@pytest.mark.parametrize(
    "resize",
    [
        lambda tensor: tensor.resize_(2 * LARGE),
        lambda tensor: tensor.untyped_storage().resize_(0),
        lambda tensor: torch.cat([torch.ones(LARGE)] * 2, out=tensor[:0]),
    ],
)
def test_large_storages_are_not_resized_and_their_clones_are(resize: Callable[[torch.Tensor], object]) -> None:
    arrived = sent(torch.ones(LARGE))
    resize(arrived.clone())
    with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
        resize(arrived)


def test_a_legacy_storage_arrives() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says once in a process that they are deprecated
        storage = large().storage()
    arrived = sent(storage)
    assert type(arrived) is type(storage)
    assert torch.equal(torch.empty(0).set_(arrived), large())


# ------------------------------------------------------------------ arrays and bytes
def frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(LARGE),
        lambda: np.arange(LARGE).reshape(8, -1).T,
        lambda: np.asfortranarray(np.arange(LARGE).reshape(8, -1)),
        lambda: np.arange(LARGE).reshape(8, -1)[:, ::-1],
        lambda: np.arange(LARGE).reshape(-1, 8)[:, :5],
        lambda: np.arange(LARGE)[::100],
        lambda: np.broadcast_to(np.arange(8.0), (LARGE, 8)),
        lambda: frozen(np.arange(LARGE)),
        lambda: frozen(np.arange(LARGE).reshape(8, -1)[:, ::-1]),
        lambda: np.zeros(LARGE, dtype=[("x", "i4"), ("y", "f8", (2,))]),
        lambda: np.arange(LARGE).astype("M8[s]"),
        lambda: frozen(np.arange(9).astype("m8[D]")[::-3]),
        lambda: np.arange(LARGE).astype(">i4")[::3],
        lambda: frozen(np.arange(9).astype(">i4")),
        lambda: np.array([None, "text", [1]], dtype=object),
        lambda: np.array(["text"] * LARGE),
        lambda: np.float64(3),
        lambda: np.array(3.0),
        lambda: np.empty((0, 3)),
        lambda: np.ma.masked_array(np.arange(LARGE), mask=np.arange(LARGE) % 2 == 0),
        lambda: np.arange(LARGE).view(np.matrix),
        lambda: np.arange(LARGE).view(np.matrix)[:, ::-1],
        lambda: np.zeros(LARGE, dtype=[("x", "i4"), ("y", "f8")]).view(np.recarray),
        lambda: np.recarray((3,), dtype=[("x", "O")]),
    ],
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # numpy's own, of matrix
def test_arrays_of_every_kind_arrive_as_they_were(make: Callable[[], Any]) -> None:
    array = make()
    arrived = sent(array)
    assert type(arrived) is type(array)
    assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(arrived, array)
    if isinstance(array, np.ndarray):
        assert arrived.flags.writeable == array.flags.writeable
        assert arrived.flags.f_contiguous >= array.flags.f_contiguous


class Tokens(np.memmap[Any, Any]):
    """A user's own kind of map."""


@pytest.mark.parametrize("make", [lambda i: np.full(1000, i, np.uint8), lambda i: torch.full((250,), float(i))])
def test_many_small_arrays_are_in_memory_once(make: Callable[[int], Any]) -> None:
    arrays = [make(i % 250) for i in range(8_000)]
    outgoing = packed(arrays)
    in_pickle, *beside = (os.fstat(fd).st_size for fd in outgoing.fds)
    arrived = received(outgoing)
    assert in_pickle <= 3 << 20  # the first, and where the others are
    assert 6_000_000 <= sum(beside) <= 8_500_000
    assert len(beside) <= 3
    for here, there in zip(arrays, arrived, strict=True):
        assert type(here) is type(there)
        assert (here == there).all()
        there[0] = 7  # each is writable, and has memory of its own
    if isinstance(arrived[0], torch.Tensor):
        assert {each.untyped_storage().nbytes() for each in arrived} == {1000}
        arrived[0].resize_(300)  # as before: few small ones are torch's own


def test_views_of_a_mapped_file_are_views_of_it_there_too(tmp_path: Path) -> None:
    np.arange(LARGE + 1000).tofile(tmp_path / "data")
    array = np.memmap(tmp_path / "data", np.int64, "r+", offset=8000)
    pairs = array.view(np.dtype([("low", np.int32), ("high", np.int32)]))
    views = [array, array[7:], array[:3], array[100:101], array[:4096].reshape(64, 64).T, pairs, array.view(Tokens)]
    outgoing = packed(views)
    arrived = received(outgoing)
    assert len(outgoing.fds) == 1  # the pickle
    assert (arrived[0].filename, arrived[0].mode, arrived[0].offset) == (str(array.filename), "r+", array.offset)
    array[:] += 1_000_000
    for here, there in zip(views, arrived, strict=True):
        assert type(there) is type(here)
        np.testing.assert_array_equal(there, here)
    arrived[0][3] = -1
    assert int(array[3]) == int(np.fromfile(tmp_path / "data", np.int64)[1003]) == -1


@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_mapped_file_is_written_to_only_where_it_was(mode: Any, tmp_path: Path) -> None:
    np.arange(LARGE).tofile(tmp_path / "data")
    array = np.memmap(tmp_path / "data", np.int64, mode)
    outgoing = packed(array)
    arrived = received(outgoing)
    assert outgoing.copied == (array.nbytes if mode == "c" else 0)
    if mode == "c":
        arrived[0] = 5
    else:
        with pytest.raises(ValueError, match="read-only"):
            arrived[0] = 5
    assert int(array[0]) == int(np.fromfile(tmp_path / "data", np.int64)[0]) == 0


def test_a_map_is_copied_without_its_file_and_to_other_machines(tmp_path: Path) -> None:
    np.ones(LARGE, np.int64).tofile(tmp_path / "data")
    array = np.memmap(tmp_path / "data", np.int64, "r+")
    outgoing = pack(lambda found: array, is_here=False)
    elsewhere = received(outgoing)
    (tmp_path / "data").unlink()
    gone = sent(array)
    array[:] = 2
    assert int(elsewhere.sum()) == int(gone.sum()) == LARGE


def test_a_map_of_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    """Reading the pages that the file has lost would end the notebook with SIGBUS."""
    np.zeros(LARGE, np.int64).tofile(tmp_path / "data")
    array = np.memmap(tmp_path / "data", np.int64, "r")
    os.truncate(tmp_path / "data", 4 * LARGE)
    for gone in (array, array[::2]):
        with pytest.raises(ValueError, match=f"data was truncated to {4 * LARGE} bytes, but the map needs "):
            packed(gone)
    assert len(sent(array[: LARGE // 2])) == len(sent(array[: LARGE // 2][::2])) * 2 == LARGE // 2


def test_a_file_that_was_replaced_or_emptied_meanwhile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    np.zeros(LARGE, np.int64).tofile(path)
    array = np.memmap(path, np.int64, "r")
    outgoing = packed(array, parts={"data": array})
    for size in (8 * LARGE - 1, 0):
        os.truncate(path, size)
        with pytest.raises(
            PayloadError, match=rf"`data` could not be rebuilt .*{path} was truncated since it was sent"
        ):
            unpack([os.dup(fd) for fd in outgoing.fds])
    np.ones(LARGE, np.int64).tofile(tmp_path / "other")
    (tmp_path / "other").replace(path)
    with pytest.raises(PayloadError, match=f"{path} was replaced since it was sent: map it again"):
        unpack([os.dup(fd) for fd in outgoing.fds])
    outgoing.close()


class Labelled(np.ndarray[Any, Any]):
    """Has its own way."""

    label = "none"

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        function, arguments, state = reduced
        return function, arguments, (*state, self.label)

    def __setstate__(self, state: Any) -> None:
        self.label = state[-1]
        super().__setstate__(state[:-1])


def test_arrays_that_say_how_they_are_pickled_are_pickled_so() -> None:
    array = np.arange(LARGE).view(Labelled)
    array.label = "mine"
    arrived = sent(array)
    assert (type(arrived), arrived.label) == (Labelled, "mine")
    np.testing.assert_array_equal(arrived, array)


def test_of_an_array_only_what_is_seen_is_sent() -> None:
    array, dates = np.zeros(100 * LARGE, dtype=np.uint8), np.ones(LARGE, "M8[s]")  # of dates NumPy gives no buffer
    for view in (array, array[LARGE : 2 * LARGE], array[::50], array.reshape(100, -1)[:, 3:900].T, dates):
        outgoing = packed(view)
        assert outgoing.copied == view.nbytes
        outgoing.close()


@pytest.mark.parametrize("size", [0, 10, 100_000, 3_000_000])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_arrive_as_they_were(kind: type, size: int) -> None:
    data = kind(os.urandom(size))
    arrived = sent([data, data, "text" * size])
    assert arrived[0] == data
    assert type(arrived[0]) is kind
    assert arrived[1] is arrived[0]
    assert arrived[2] == "text" * size


# ------------------------------------------------------------------ views of what is not sent itself
BIG = 16 * MB
"""Elements of an array that is seen in small part."""


@pytest.mark.parametrize(
    ("view", "limit"),
    [
        (lambda base: base[:3], 64),
        (lambda base: base[5 : 5 + LARGE], 2 * LARGE),
        (lambda base: base.view(-1, 64)[3:10, 5:9].t(), 4096),
        (lambda base: base[7].expand(100, 100), 64),
        (lambda base: base[:0], 64),
        (lambda base: base.view(-1, 2)[:0], 64),
        (lambda base: nn.Parameter(base[3:20]), 64),
    ],
)
def test_of_a_view_of_a_large_tensor_what_it_sees_is_sent(
    view: Callable[[torch.Tensor], torch.Tensor], limit: int
) -> None:
    base = torch.arange(BIG, dtype=torch.int32).to(torch.bfloat16)
    outgoing = packed(view(base))
    arrived = received(outgoing)
    assert type(arrived) is type(view(base))
    assert (arrived.dtype, arrived.requires_grad) == (base.dtype, view(base).requires_grad)
    assert torch.equal(arrived, view(base))
    assert outgoing.copied <= limit
    assert sum(outgoing.sizes.values()) <= limit + 1000
    assert arrived.untyped_storage().nbytes() <= limit


@pytest.mark.parametrize(
    "make",
    [
        lambda base: [base[:10], base[5:20]],
        lambda base: [base[:LARGE], base[LARGE // 2 : 2 * LARGE]],
        lambda base: [base[1:10], base.view(torch.uint8)[13:80]],
        lambda base: [base[::64], base[:LARGE]],
        lambda base: [base[::64], base[::96]],
        lambda base: [base[4:100], nn.Parameter(base[50:60], requires_grad=False)],
        lambda base: [base[::96], base],
        lambda base: [base[3:LARGE], base[3:LARGE].numpy()],
        lambda base: [base.numpy()[:10], base.numpy()[5:20]],
    ],
)
def test_views_that_overlap_share_their_memory_there_too(make: Callable[[torch.Tensor], list[Any]]) -> None:
    base = torch.arange(BIG // 4, dtype=torch.int32)
    here = make(base)
    there = sent(here)
    before = [torch.as_tensor(each).clone() for each in here]
    assert all(torch.equal(torch.as_tensor(its), was) for its, was in zip(there, before, strict=True))
    there[0][...] = -1
    assert all(torch.equal(torch.as_tensor(each), was) for each, was in zip(here, before, strict=True))
    here[0][...] = -1
    assert not torch.equal(torch.as_tensor(here[1]), before[1])
    assert torch.equal(torch.as_tensor(there[1]), torch.as_tensor(here[1]))


def test_columns_of_one_table_bring_what_they_span_once() -> None:
    table = torch.arange(BIG, dtype=torch.int32).view(-1, 64)
    whole: tuple[Any, ...] = (table, table.numpy())
    for columns in ([each[:, 3], each[:, 9]] for each in whole):
        outgoing = packed(columns)
        arrived = received(outgoing)
        assert outgoing.copied <= 4 * BIG
        assert all(np.array_equal(its, column) for its, column in zip(arrived, columns, strict=True))


# ------------------------------------------------------------------ nests of anything
some_tensors = st.builds(
    lambda size, dtype, start: torch.arange(start, start + size).to(dtype),
    st.sampled_from([0, 1, 7, tensors.MIN_BUFFER_BYTES, tensors.MIN_BUFFER_BYTES + 3, LARGE]),
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.complex64]),
    st.integers(0, 100),
)
numpy_arrays = st.builds(
    lambda size, dtype: np.arange(size).astype(dtype),
    st.sampled_from([0, 1, 9, tensors.MIN_BUFFER_BYTES, LARGE + 5]),
    st.sampled_from(["f4", "i8", "u1", "c16"]),
)


@st.composite
def nests(draw: st.DrawFn) -> list[Any]:
    """Lists of some_tensors, arrays, views of those before, and lists of those before."""
    things: list[Any] = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["tensor", "array", "view", "again", "list", "bytes"]))
        if kind == "tensor" or not things:
            things.append(draw(some_tensors))
        elif kind == "array":
            things.append(draw(numpy_arrays))
        elif kind == "bytes":
            things.append(bytes(draw(st.sampled_from([3, 1 << 20]))))
        else:
            earlier = draw(st.sampled_from(things))
            if kind == "again":
                things.append(earlier)
            elif kind == "list":
                things.append([earlier, draw(st.integers())])
            elif isinstance(earlier, (torch.Tensor, np.ndarray)):
                start, step = draw(st.integers(0, 5)), draw(st.integers(1, 3))
                things.append(earlier[start::step])
    return things


@given(nests())
@settings(deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_nests_arrive_as_they_were_with_their_aliasing(things: list[Any]) -> None:
    arrived = sent(things)
    assert_same(arrived, things)
    for one, other in zip(arrived, things, strict=True):
        for another, its in zip(arrived, things, strict=True):
            assert (one is another) == (other is its)
            if isinstance(other, torch.Tensor) and isinstance(its, torch.Tensor) and other.numel() and its.numel():
                assert overlap(one, another) == overlap(other, its)
            if isinstance(other, np.ndarray) and isinstance(its, np.ndarray):
                tied = np.shares_memory(one, another)
                assert not tied or np.shares_memory(other, its)
                if all(each.flags.c_contiguous and each.nbytes >= tensors.MIN_BUFFER_BYTES for each in (other, its)):
                    assert tied == np.shares_memory(other, its)
    for one, other in zip(arrived, things, strict=True):  # what the receiver writes stays there
        if isinstance(one, torch.Tensor):
            before = other.clone()
            one.fill_(77)
            assert torch.equal(other, before)
        elif isinstance(one, np.ndarray):
            kept = other.copy()
            one.fill(77)
            np.testing.assert_array_equal(other, kept)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (begin, end), (its_begin, its_end) = (
        (each.data_ptr(), each.data_ptr() + ((len(each) - 1) * each.stride(0) + 1) * each.element_size())
        for each in (one, other)
    )
    return begin < its_end and its_begin < end


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert_alike(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, list):
        for each, its in zip(one, other, strict=True):
            assert_same(each, its)
    else:
        assert one == other


# ------------------------------------------------------------------ shared memory stays shared


def test_memory_shared_by_loader_workers_is_copied() -> None:
    """The user did not ask for it, and each batch takes a descriptor."""
    batches = [batch for (batch,) in DataLoader(TensorDataset(torch.arange(12)), batch_size=4, num_workers=1)]
    outgoing = packed(batches)
    assert len(outgoing.fds) == 1
    arrived = received(outgoing)
    arrived[1][0] = 100
    assert torch.cat(batches).tolist() == list(range(12))


def test_shared_memory_of_a_name_stays_shared_and_that_of_a_rank_is_copied(tmp_path: Path) -> None:
    """In a process of its own: torch starts a manager, which stays as long as that."""
    code = f"""
import os, torch
from nblaunch.transfer.parcel import pack, unpack
torch.multiprocessing.set_sharing_strategy("file_system")
tensor, mapped = torch.zeros(10).share_memory_(), torch.from_file({str(tmp_path / "data")!r}, shared=True, size=3)
mapped[0] = 1
outgoing = pack(lambda found: (tensor, torch.ones(10).share_memory_(), mapped))
arrived, of_no_one, copied = unpack([os.dup(fd) for fd in outgoing.fds])
arrived[3], mapped[1] = 7.0, 2
os.environ["NBLAUNCH_RANK"] = "0"
outgoing = pack(lambda found: tensor)
tensor[3] = 8.0
print(arrived[3].item(), of_no_one.sum().item(), copied[0].item(), unpack([*map(os.dup, outgoing.fds)])[3].item())
"""
    assert printed(code) == ["8.0", "10.0", "1.0", "7.0"]
    assert np.fromfile(tmp_path / "data", dtype=np.float32).tolist() == [1.0, 2.0, 0.0]


# ------------------------------------------------------------------ from a GPU
class FakeStorage:
    """As a storage on a GPU is seen by pickling; there is none here."""

    device = torch.device("cuda")

    def cpu(self) -> Any:
        return large().untyped_storage()


def test_gpu_tensors_are_sent_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made, arguments = tensors._reduce_storage(FakeStorage(), Outgoing())  # type: ignore[misc]
    assert made is tensors.storage_on_own_device
    monkeypatch.delenv("NBLAUNCH_RANK", raising=False)
    assert tensors.storage_on_own_device(*arguments).device.type == "cpu"  # in the notebook
    monkeypatch.setenv("NBLAUNCH_RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.UntypedStorage, "cuda", lambda storage: "on the GPU")
    assert tensors.storage_on_own_device(*arguments) == "on the GPU"  # in a rank


# ------------------------------------------------------------------ sealed, and nothing left
def test_sent_data_cannot_be_changed() -> None:
    outgoing = packed(large())
    for fd in outgoing.fds:
        with pytest.raises(PermissionError, match="Operation not permitted"):
            os.write(fd, b"x")
        for size in (1, 1 << 30):
            with pytest.raises(PermissionError, match="Operation not permitted"):
                os.ftruncate(fd, size)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    outgoing.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_unpacked_objects_hold_no_descriptor() -> None:
    before = descriptors()
    held = [sent(large()) for _ in range(20)]
    assert descriptors() == before
    assert torch.equal(held[3], large())


def test_memory_goes_with_what_was_unpacked() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:nblaunch")

    before = mapped()
    arrived = sent(large())
    assert mapped() > before
    del arrived
    gc.collect()
    assert mapped() == before


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


class Refused:
    def __reduce__(self) -> Any:
        return int, ("not here",)


def test_a_failure_of_the_sender_or_the_receiver_leaves_nothing() -> None:
    before = descriptors()
    with pytest.raises(RuntimeError, match="I stay here"):
        packed([large(), torch.zeros(3).share_memory_(), Stubborn()])
    with pytest.raises(ValueError, match="not here"):
        sent([large(), Refused()])
    gc.collect()
    assert descriptors() == before


# ------------------------------------------------------------------ sizes
def test_the_sizes_of_parts_are_reported() -> None:
    data, other = large(), np.arange(LARGE)
    outgoing = packed({"a": data, "b": other, "c": data[3:]}, {"data": data, "other": other, "view": data[3:]})
    assert outgoing.sizes["data"] == pytest.approx(4 * LARGE, rel=0.01)
    assert outgoing.sizes["other"] == pytest.approx(8 * LARGE, rel=0.01)
    assert outgoing.sizes["view"] < 1000  # its memory is that of data
    assert outgoing.sizes[""] < 1000
    assert outgoing.copied == 12 * LARGE
    outgoing.close()


def test_parts_arrive_as_the_objects_that_the_whole_refers_to() -> None:
    data = [large()]
    outgoing = packed({"x": data, "y": [data]}, {"data": data})
    arrived = received(outgoing)
    assert arrived["x"] is arrived["y"][0]
    assert torch.equal(arrived["x"][0], data[0])


# ------------------------------------------------------------------ segments
@given(st.lists(st.integers(1, 100 << 20), max_size=300))
@settings(deadline=None, derandomize=True)
def test_regions_share_segments_so_that_there_are_few(sizes: list[int]) -> None:
    regions = [Region(i << 32, size) for i, size in enumerate(sizes)]
    groups = segments.grouped(regions)
    assert [region for group in groups for region in group] == regions
    assert len(groups) <= 60


def test_a_small_piece_that_is_kept_holds_little_more() -> None:
    def mapped() -> int:
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:nblaunch" in line]
        ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        return sum(end - start for start, end in ends)

    gc.collect()
    before = mapped()
    data = [*(torch.ones(1 << 20) for _ in range(14)), torch.ones(5000), *(torch.ones(200_000) for _ in range(30))]
    arrived = sent(data)
    assert mapped() - before > 60 << 20
    kept = arrived[14]
    del arrived
    gc.collect()
    assert kept.sum() == 5000
    assert mapped() - before <= 6 << 20


@pytest.mark.parametrize("address", [0, 1, 63, 4095])
def test_pieces_keep_their_alignment(address: int) -> None:
    memory = np.arange(300_000, dtype=np.uint8)
    start = memory.ctypes.data + address
    for regions in ([Region(start, 200_000)], [Region(start, 1000), Region(start + 5000, 2001)]):
        placed = dict(zip(regions, segments.write(regions), strict=True))
        for region, (segment, offset, is_new) in placed.items():
            assert is_new
            assert (offset - region.address) % segments._ALIGNMENT == 0
            assert segment.equals(offset, region)
            memory[address + 5] += 1
            assert segment.equals(offset, region) == (region.address != start)
            memory[address + 5] -= 1


@pytest.mark.parametrize("make", [large, lambda: bytes(LARGE), lambda: np.ones((LARGE, 50), np.uint16)[:, 0]])
def test_data_without_room_is_not_copied(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data = make()
    monkeypatch.setattr(segments, "_MIN_CHECKED_BYTES", 1000)
    monkeypatch.setattr(segments, "free_memory", lambda: 12_345_678)
    monkeypatch.setattr(np, "ascontiguousarray", lambda *_: pytest.fail("copied"))
    with pytest.raises(NoRoomError, match=r"not enough memory for \d+ KB: 12 MB free$"):
        packed(data)


def test_sizes_are_formatted_for_people() -> None:
    words = [segments.in_words(size) for size in (0, 999, 1000, 1_500_000, 2_340_000_000, 5e12)]
    assert words == ["0 bytes", "999 bytes", "1 KB", "2 MB", "2.3 GB", "5000.0 GB"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_a_tensor_maps_is_sent_as_what_it_holds(shared: bool, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(np.arange(LARGE, dtype=np.float32).tobytes())
    tensor = torch.from_file(str(file), shared=shared, size=LARGE)
    assert torch.equal(sent(tensor), torch.arange(LARGE, dtype=torch.float32))


def test_a_result_in_files_is_the_same_each_time_whatever_its_readers_change(tmp_path: Path) -> None:
    shared = torch.arange(3000.0).share_memory_()
    parcel = pack(lambda found: {"shared": shared, "large": torch.ones(100_000)})
    store_parcel(tmp_path, 3, parcel.fds)
    for _ in range(2):
        ((rank, fds),) = parcels_in(tmp_path).items()
        found = unpack(fds)
        assert rank == 3
        assert torch.equal(found["shared"], torch.arange(3000.0))
        assert torch.equal(found["large"], torch.ones(100_000))
        for each in found.values():
            each.add_(1)


def test_a_file_whose_pages_are_moved_just_now_is_sealed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = fcntl.fcntl, [errno.EBUSY, errno.EBUSY]

    def busy(fd: int, command: int, *arguments: int) -> int:
        if command == fcntl.F_ADD_SEALS and refusals:
            raise OSError(refusals.pop(), "Device or resource busy")
        return real(fd, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", busy)
    fd = segments.sealed([(b"abc", 0)])
    assert segments.is_sealed(fd)
    os.close(fd)
    assert not refusals
    refusals.append(errno.EPERM)
    with pytest.raises(PermissionError):
        segments.sealed([(b"abc", 0)])
