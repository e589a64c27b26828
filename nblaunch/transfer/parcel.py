"""Parcels: objects on their way to another process, as a pickle and, beside it, memory that receivers map.

A parcel is a list of descriptors. The first is a blob with the pickle, then come segments with large buffers, then
shared memory that users created themselves. A receiver maps the segments privately. So the machine holds one copy of
the data besides the sender's own, for any number of receivers, and each may write to what it received. A file that the
user has mapped is a segment too: what the sender could write to it, receivers can.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import mmap
import os
import pickle
import struct
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nblaunch.errors import PayloadError, text_of
from nblaunch.machine import segments
from nblaunch.machine.memory_maps import FileMaps
from nblaunch.machine.own_code import users_part
from nblaunch.machine.segments import NoRoomError, Placed, Region, Segment
from nblaunch.transfer import pickling, tensors
from nblaunch.transfer.definitions import LostReferenceError
from nblaunch.transfer.layout import Layout, Place, StoragePart
from nblaunch.transfer.outgoing import Outgoing, Strided
from nblaunch.transfer.salvage import Salvaged, SalvagingUnpickler
from nblaunch.wire.channel import write_blob

_LENGTH = struct.Struct("!Q")
_MIN_CHECKED_BYTES = 1 << 20
"""A smaller pickle goes to memory, however short that is."""


class Store(Protocol):
    """Puts memory into segments."""

    @property
    def folder(self) -> Path:
        """Where to put a file if memory is short."""

    def place(self, regions: Sequence[Region], passing: Collection[Region]) -> Sequence[Placed]:
        """Put regions, which are in order and do not overlap, into segments.

        Args:
            regions: The regions.
            passing: Those that exist only for this parcel, and are freed after it.
        """


class UncachedStore:
    """A store that writes new segments and keeps none.

    Args:
        folder: Where to put a file if memory is short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, regions: Sequence[Region], passing: Collection[Region]) -> Sequence[Placed]:
        placed = dict(segments.write(regions, self.folder))
        return [placed[region] for region in regions]


class Parcel:
    """A packed object.

    Attributes:
        fds: The descriptors to send. `close` closes them.
        sizes: Bytes of each named part; under "" those of all else.
        copied: Bytes that were copied for this parcel.
        from_gpu: Bytes that were copied from a GPU.
    """

    def __init__(self, blob: int, placed: Sequence[Segment], outgoing: Outgoing, copied: int) -> None:
        self.sizes, self.from_gpu, self.copied = outgoing.sizes, outgoing.from_gpu, copied
        self.fds = (blob, *(segment.fd for segment in placed), *outgoing.descriptors)
        self.close = weakref.finalize(self, _close, blob, [*placed, *outgoing.lent])


def _close(blob: int, held: list[object]) -> None:
    held.clear()  # a segment closes its descriptor unless a store holds it too
    os.close(blob)


# ------------------------------------------------------------------ packing
def pack(
    build: Callable[[pickling.Found], Any],
    store: Store,
    parts: Mapping[str, Any] | None = None,
    home: pickling.Home | None = None,
    *,
    is_here: bool = True,
    may_salvage: bool = False,
) -> Parcel:
    """Pack the object that `build` returns.

    Args:
        build: Called with the definitions that the pickler finds in `parts`; see `nblaunch.transfer.pickling.dump`.
        store: Puts large buffers into segments.
        parts: Parts of the object, by name: their sizes are measured, and the receiver's errors name them. Default:
            none.
        home: See `nblaunch.transfer.pickling.Pickler`.
        is_here: Whether all receivers are on this machine; see `nblaunch.machine.memory_maps.FileMaps`. Default: True.
        may_salvage: `unpack` returns a `Salvaged` instead of raising. Default: False.

    Raises:
        Exception: Pickling failed; `nblaunch.transfer.pickling.explain` gives the reason.
        NoRoomError: There is no room; its ``sizes`` are those of the parts.
    """
    outgoing = Outgoing(FileMaps(is_here))
    try:
        pickler = pickling.Pickler(outgoing, outgoing, home)
        for name, value in (parts or {}).items():
            pickler.dump(value)  # later occurrences are references to this one
            outgoing.count(name)
        pickler.dump(build(pickler.found))
        outgoing.count("")
        return _assemble(outgoing, store, parts=tuple(parts or ()), may_salvage=may_salvage)
    except NoRoomError as error:
        error.sizes = outgoing.sizes
        raise


def _assemble(outgoing: Outgoing, store: Store, parts: tuple[str, ...], may_salvage: bool) -> Parcel:
    """Put the out-of-band memory into segments, and the rest into a blob."""
    outgoing.check_storages()
    buffers, copies = outgoing.resolve_buffers()
    regions = [part for part in buffers if isinstance(part, Region)]
    whole = segments.merged(regions)
    placed = _placed(whole, outgoing.files.placed(whole), store, copies)
    used = list({id(each.segment): each.segment for each in placed}.values())
    places = dict(_places(regions, whole, placed, used))
    layout = Layout(
        tuple(segment.access for segment in used),
        tuple(
            _buffer_place(places[part], made) if isinstance(part, Region) else part
            for part, made in zip(buffers, outgoing.buffers, strict=True)
        ),
        parts,
        may_salvage,
    )
    head = pickle.dumps(layout, protocol=5)
    size = sum(map(len, outgoing.stream))
    folder = segments.find_room(size, store.folder) if size >= _MIN_CHECKED_BYTES else None
    blob = write_blob(_LENGTH.pack(len(head)), head, *outgoing.stream, folder=folder)
    copied = sum(region.size for region, each in zip(whole, placed, strict=True) if each.is_new)
    return Parcel(blob, used, outgoing, copied)


def _placed(
    whole: Sequence[Region], in_files: dict[Region, Placed], store: Store, copies: Collection[Region]
) -> list[Placed]:
    """Put the regions that are in no file into segments; return where each is."""
    blocks = segments.bridged([region for region in whole if region not in in_files], copies)
    spans = [Region(block[0].address, block[-1].end - block[0].address) for block in blocks]
    passing = {span for span, block in zip(spans, blocks, strict=True) if block[0] in copies}
    found = dict(in_files)
    for block, at in zip(blocks, store.place(spans, passing), strict=True):
        for region in block:
            found[region] = at._replace(offset=at.offset + region.address - block[0].address)
    return [found[region] for region in whole]


def _places(
    regions: Iterable[Region], whole: Sequence[Region], placed: Sequence[Placed], used: Sequence[Segment]
) -> Iterator[tuple[Region, tuple[Place, Place]]]:
    """Yield each region with its place, and the place of the merged region that it is part of."""
    numbers = {id(segment): number for number, segment in enumerate(used)}
    starts = [region.address for region in whole]
    for region in regions:
        at = bisect.bisect_right(starts, region.address) - 1
        number, offset = numbers[id(placed[at].segment)], placed[at].offset
        place = Place(number, offset + region.address - starts[at], region.size)
        yield region, (place, Place(number, offset, whole[at].size))


def _buffer_place(places: tuple[Place, Place], made: object) -> Place | StoragePart:
    """Return a buffer's place; for a tensor as part of a storage, as tensors that share memory share the storage."""
    place, whole = places
    if not isinstance(made, Strided) or not made.unit:
        return place
    offset = place.offset - whole.offset
    askew = offset % made.unit  # torch counts offsets in elements
    return StoragePart(Place(whole.segment, whole.offset + askew, whole.size - askew), offset - askew, place.size)


# ------------------------------------------------------------------ unpacking
def unpack(fds: Sequence[int]) -> Any:
    """Rebuild a packed object from its descriptors, and close them.

    Returns:
        The object, or a `Salvaged` if some of it could not be rebuilt and the sender allows that.

    Raises:
        PayloadError: A part could not be rebuilt; the message names it.
        Exception: User code that unpickling runs raised it.
    """
    try:
        with _Stream(fds[0], 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as stream:
            return _rebuilt(stream, fds)
    finally:
        for fd in fds:
            os.close(fd)


def _rebuilt(stream: _Stream, fds: Sequence[int]) -> Any:
    start = _LENGTH.size + _LENGTH.unpack(stream.read(_LENGTH.size))[0]
    layout: Layout = pickle.load(stream)
    last = 1 + len(layout.segments)
    mapped = [_mapped(fd, access) for fd, access in zip(fds[1:last], layout.segments, strict=True)]

    def at(place: Place) -> memoryview:
        found = mapped[place.segment][place.offset : place.offset + place.size]
        if len(found) < place.size:
            raise ValueError(f"{_path_of(fds[1 + place.segment])} is shorter than what is mapped of it")
        return found

    @functools.cache
    def storage_at(place: Place) -> Any:
        return tensors.storage_of_buffer(at(place))

    def received(part: Place | StoragePart | int) -> Any:
        if isinstance(part, StoragePart):
            return tensors.StorageSlice(storage_at(part.storage), part.offset, part.size)
        if not isinstance(part, Place):
            return fds[last + part]
        return at(part).toreadonly() if layout.segments[part.segment] == "read-only" else at(part)

    def load(unpickler: Any) -> Any:
        for name in layout.parts:
            try:
                unpickler.load()
            except (LostReferenceError, OSError, MemoryError):
                raise  # not for the content of this part
            except Exception as error:  # noqa: BLE001  # user code
                why = f"{type(error).__name__}: {text_of(error)}".rstrip(": ")
                cause = error.with_traceback(users_part(error.__traceback__) or error.__traceback__)
                raise PayloadError(f"`{name}` could not be rebuilt in the rank: {why}") from cause
        return unpickler.load()

    with contextlib.suppress(*((Exception,) if layout.may_salvage else ())):
        buffers: Any = map(received, layout.buffers)
        return load(pickle.Unpickler(stream, buffers=buffers))
    stream.seek(start)
    salvaging = SalvagingUnpickler(stream, map(received, layout.buffers))
    return Salvaged(load(salvaging), salvaging.failed)


def _mapped(fd: int, access: segments.Access = "private") -> memoryview:
    size = os.fstat(fd).st_size
    return segments.map_segment(fd, size, access) if size else memoryview(b"")  # of a file that was emptied


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "a file"


class _Stream(mmap.mmap):
    """The mapped file of a pickle."""

    def readinto(self, into: Any) -> int:
        room, at = memoryview(into).cast("B"), self.tell()
        self.seek(min(len(room), len(self) - at), os.SEEK_CUR)
        with memoryview(self) as own:
            room[: self.tell() - at] = own[at : self.tell()]
        return self.tell() - at
