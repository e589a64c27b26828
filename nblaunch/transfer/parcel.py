"""Parcels: objects on their way to another process, as a pickle and, beside it, memory that receivers map.

A parcel is a list of descriptors. The first is a blob with the pickle, then come segments with large buffers, then
shared memory that users created themselves. A receiver maps the segments privately. So the machine holds one copy of
the data besides the sender's own, for any number of receivers, and each may write to what it received.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nblaunch.errors import PayloadError, text_of
from nblaunch.machine import segments
from nblaunch.machine.own_code import users_part
from nblaunch.machine.segments import NoRoomError, Segment
from nblaunch.transfer import pickling, tensors
from nblaunch.transfer.definitions import LostReferenceError
from nblaunch.transfer.outgoing import Outgoing, View
from nblaunch.transfer.sent_data import sent_data_cache
from nblaunch.wire.channel import write_blob

_MIN_CHECKED_BYTES = 1 << 20
"""A smaller pickle goes to memory, however short that is."""


class _Place(NamedTuple):
    """A range of bytes in one of a parcel's segments."""

    segment: int
    offset: int
    size: int


class _StoragePart(NamedTuple):
    """The part of a storage that a tensor refers to; offset and size in bytes."""

    storage: _Place
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the receiver of a parcel must know before it reads the pickle."""

    segments: int
    """How many there are."""
    buffers: tuple[_Place | _StoragePart | int, ...]
    """For each buffer its place, or the index of a shared descriptor."""
    parts: tuple[str, ...]
    """The names of the objects that the pickle holds before the last, one after the other."""


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
    held.clear()  # a segment closes its descriptor unless the cache holds it too
    os.close(blob)


# ------------------------------------------------------------------ packing
def pack(
    build: Callable[[pickling.Found], Any],
    folder: Path | Callable[[], Path],
    parts: Mapping[str, Any] | None = None,
    home: pickling.Home | None = None,
    *,
    is_cached: bool = False,
    is_here: bool = True,
) -> Parcel:
    """Pack the object that `build` returns.

    Args:
        build: Called with the definitions that the pickler finds in `parts`; see `nblaunch.transfer.pickling.dump`.
        folder: Where to put files if memory is short, or what makes the place once there is something to put.
        parts: Parts of the object, by name: their sizes are measured, and the receiver's errors name them. Default:
            none.
        home: See `nblaunch.transfer.pickling.Pickler`.
        is_cached: Whether to send again what the cache of sent data holds, and keep what is new. Default: False.
        is_here: Whether all receivers are on this machine: they map the files that this process has mapped. Default:
            True.

    Raises:
        Exception: Pickling failed; `nblaunch.transfer.pickling.explain` gives the reason.
        NoRoomError: There is no room; its ``sizes`` are those of the parts.
    """
    outgoing = Outgoing(is_here)
    try:
        pickler = pickling.Pickler(outgoing, outgoing, home)
        for name, value in (parts or {}).items():
            pickler.dump(value)  # later occurrences are references to this one
            outgoing.count(name)
        pickler.dump(build(pickler.found))
        outgoing.count("")
        return _assemble(outgoing, folder, tuple(parts or ()), is_cached)
    except NoRoomError as error:
        error.sizes = outgoing.sizes
        raise


def _assemble(outgoing: Outgoing, folder: Path | Callable[[], Path], parts: tuple[str, ...], is_cached: bool) -> Parcel:
    """Put the out-of-band memory into segments, and the rest into a blob."""
    outgoing.check_storages()
    whole, views = outgoing.resolve()
    place = sent_data_cache.place if is_cached else segments.write
    placed = place(whole, _made(folder)) if whole else []
    used = list({id(each.segment): each.segment for each in placed}.values())
    numbers = {id(segment): number for number, segment in enumerate(used)}

    def place_of(region: int, view: View) -> _Place | _StoragePart:
        at = placed[region]
        number, offset = numbers[id(at.segment)], view.span.address - whole[region].address
        if not view.unit:
            return _Place(number, at.offset + offset, view.span.size)
        askew = offset % view.unit  # torch counts offsets in elements
        storage = _Place(number, at.offset + askew, whole[region].size - askew)
        return _StoragePart(storage, offset - askew, view.span.size)

    layout = _Layout(
        len(used),
        tuple(each if isinstance(each, int) else place_of(*each) for each in views),
        parts,
    )
    head, size = pickle.dumps(layout, protocol=5), sum(map(len, outgoing.stream))
    in_folder = segments.find_room(size, _made(folder)) if size >= _MIN_CHECKED_BYTES else None
    blob = write_blob(head, *outgoing.stream, folder=in_folder)
    return Parcel(blob, used, outgoing, sum(region.size for region, at in zip(whole, placed, strict=True) if at.is_new))


def _made(folder: Path | Callable[[], Path]) -> Path:
    return folder if isinstance(folder, Path) else folder()


# ------------------------------------------------------------------ unpacking
def unpack(fds: Sequence[int]) -> Any:
    """Rebuild a packed object from its descriptors, and close them.

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
    layout: _Layout = pickle.load(stream)
    last = 1 + layout.segments
    mapped = [segments.map_segment(fd, os.fstat(fd).st_size) for fd in fds[1:last]]

    def at(place: _Place) -> memoryview:
        return mapped[place.segment][place.offset : place.offset + place.size]

    @functools.cache
    def storage_at(place: _Place) -> Any:
        return tensors.storage_of_buffer(at(place))

    def received(part: _Place | _StoragePart | int) -> Any:
        if isinstance(part, _StoragePart):
            return tensors.StorageSlice(storage_at(part.storage), part.offset, part.size)
        return at(part) if isinstance(part, _Place) else fds[last + part]

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

    buffers: Any = map(received, layout.buffers)
    return load(pickle.Unpickler(stream, buffers=buffers))


class _Stream(mmap.mmap):
    """The mapped file of a pickle."""

    def readinto(self, into: Any) -> int:
        room, at = memoryview(into).cast("B"), self.tell()
        self.seek(min(len(room), len(self) - at), os.SEEK_CUR)
        with memoryview(self) as own:
            room[: self.tell() - at] = own[at : self.tell()]
        return self.tell() - at
