"""The notebook's names that kept ranks have: which of them a task must send again.

A name is sent if a rank does not have the notebook's present value, by the digest of its pickle. Functions travel
without their globals, so the names that they use are names to send as well. A tensor or module that belongs to one name
and is used by another, as an optimizer uses its model's parameters, travels as a reference: the ranks' optimizer then
updates the ranks' model, whichever was sent first.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch.machine.segments import Region, Segment
from nblaunch.transfer import pickling
from nblaunch.transfer.parameters import PROVIDED
from nblaunch.transfer.parcel import region_of, sent_data_cache
from nblaunch.transfer.tensors import BufferSink
from nblaunch.wire.messages import MAX_BOUND, Names, SentName

_DIGEST_BYTES = 16
_MIN_COMPARED_BYTES = 1 << 20
"""A larger array is compared with its copy in the cache of sent data, which is faster than hashing it again."""
_CHUNK_BYTES = 64 << 20


@dataclass(slots=True)
class _Owned:
    """A tensor or module of the notebook that belongs to one of its names."""

    thing: weakref.ref[Any]
    name: str
    key: str


@dataclass(slots=True)
class Gathered:
    """What a task sends: the names to bind with their values, and what the pickler must know."""

    names: dict[str, SentName]
    home: _Packing


class SentNames:
    """See the module. Several threads may gather tasks at once. A file that ranks map counts by its identity."""

    def __init__(self, names: dict[str, Any], ranks: int, is_here: bool = True) -> None:
        self.names, self.is_here = names, is_here
        self._had: list[dict[str, bytes]] = [{} for _ in range(ranks)]
        """Of each rank: the digests that it has been sent."""
        self._lost: list[set[str]] = [set() for _ in range(ranks)]
        """Of each rank: the keys of tensors and modules that it had, and that a task must not refer to."""
        self._digests: dict[str, bytes] = {}
        self._owned: dict[int, _Owned] = {}
        """By the id of the object."""
        self._owned_by: dict[str, dict[int, _Owned]] = {}
        """The same by name."""
        self._tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next_token = itertools.count(1)
        self._keys = itertools.count(1)
        self._hashed: dict[tuple[int, int, int], tuple[weakref.ref[Segment], bytes]] = {}
        """Digests of large arrays, by the segment that holds a copy."""

    def gather(
        self,
        names: Iterable[str],
        code: Iterable[Any],
        present: Collection[int],
        bound: Collection[str] = (),
        *,
        is_idle: bool = True,
    ) -> Gathered:
        """Return what a task must send for `names`, and for the globals of `code`, to the ranks that are alive.

        Names that ranks have bound themselves may be unsendable: they are left to them. Unless no task runs or queues
        (`is_idle`), every name is sent, and the ranks bind what has changed.
        """
        for name in self._owned_by.keys() - self.names.keys():  # deleted in the notebook
            self._disown(name)
        round_ = _Round(self, set(bound))
        for value in code:
            round_.dump("", value)
        round_.need(names)
        digests = round_.digests.items()
        to_send = {name for name, digest in digests if not is_idle or self._is_missing(name, digest, present)}
        return Gathered(
            {name: round_.sent_name(name) for name in round_.digests if name in to_send}, _Packing(self, to_send)
        )

    def gather_pushed(self, values: Mapping[str, Any], present: Collection[int]) -> Gathered:
        """Return what a push must send: these values, whatever the ranks have, and the names that they use."""
        own = {name for name, value in values.items() if self.names.get(name) is value}
        for name in own:
            self._disown(name)
        round_ = _Round(self, set())
        round_.need(own)
        plain: list[Any] = []
        for name, value in values.items():
            if name not in own:
                collecting = _Digesting(round_, "", is_plain=True)
                pickling.Pickler(sink := BufferSink(), sink, collecting).dump(value)
                round_.need(collecting.used)
                plain += collecting.own
        digests = round_.digests
        to_send = {name for name in digests if name in own or self._is_missing(name, digests[name], present)}
        sent = {name: round_.sent_name(name) for name in to_send - set(values)}
        pushed = {
            name: SentName(value, digests.get(name, b"") if name in own else b"", is_forced=True)
            for name, value in values.items()
        }
        return Gathered({**sent, **pushed}, _Packing(self, to_send, [id(each) for each in plain]))

    def _disown(self, name: str) -> None:
        self._digests.pop(name, None)
        self._take_owned(name)

    def _take_owned(self, name: str) -> dict[int, _Owned]:
        found = self._owned_by.pop(name, {})
        for at, owned in found.items():
            if self._owned.get(at) is owned:
                self._owned.pop(at, None)
        return found

    def token_of(self, definition: Any) -> int:
        if definition not in self._tokens:
            self._tokens[definition] = next(self._next_token)
        return self._tokens[definition]

    def _is_missing(self, name: str, digest: bytes, present: Collection[int]) -> bool:
        return any(self._had[rank].get(name) != digest for rank in present)

    def arrived(self, rank: int, names: Mapping[str, SentName]) -> None:
        """Note that a rank has these names now, as far as they were sent to it."""
        own = [(name, sent) for name, sent in names.items() if sent.ranks is None or rank in sent.ranks]
        self._had[rank].update((name, sent.digest) for name, sent in own)

    def has_bound(self, rank: int, found: Names) -> None:
        """Note what a rank has: what it has deleted is sent again if a task uses it."""
        if self._lost[rank] or found.lost:
            used = {owned.key for owned in list(self._owned.values())}
            self._lost[rank] = self._lost[rank].union(found.lost) & used
        if len(found.names) < MAX_BOUND:
            alive = {each.name for each in found.names}.union(found.private)
            had = self._had[rank]
            for name in had.keys() - alive:
                del had[name]

    def forget(self, rank: int) -> None:
        self._had[rank] = {}
        self._lost[rank] = set()

    def take_lost(self, key: str) -> bool:
        """Return True if a rank has lost the object under this key, which the caller sends whole."""
        is_lost = any(key in lost for lost in self._lost)
        for lost in self._lost:
            lost.discard(key)
        return is_lost

    # -------------------------------------------------------------- ownership
    def owner_of(self, thing: Any) -> _Owned | None:
        """Return who owns a tensor or module; None if no name does."""
        owned = self._owned.get(id(thing))
        is_valid = owned is not None and owned.thing() is thing and owned.name in self.names
        return owned if is_valid else None

    def own(self, name: str, digest: bytes, things: Iterable[Any]) -> None:
        """Make a name the owner of these objects. New content gets new keys: references to the old are stale."""
        is_same = self._digests.get(name) == digest
        self._digests[name] = digest
        before = self._take_owned(name)
        mine = self._owned_by[name] = {}
        for thing in things:
            old = before.get(id(thing))
            is_known = is_same and old is not None and old.thing() is thing
            key = old.key if is_known and old is not None else f"{name}/{next(self._keys)}"
            mine[id(thing)] = self._owned[id(thing)] = _Owned(weakref.ref(thing), name, key)

    # -------------------------------------------------------------- digests of large arrays
    def digest_of(self, region: Region) -> bytes:
        """Return the digest of memory. If it equals a copy that was hashed before, it is not hashed again."""
        copy = sent_data_cache.same(region) if region.size >= _MIN_COMPARED_BYTES else None
        if copy is None:
            return _hash(region.view())
        at = (id(copy.segment), copy.offset, region.size)
        known = self._hashed.get(at)
        if known is None or known[0]() is not copy.segment:
            self._hashed = {key: value for key, value in self._hashed.items() if value[0]() is not None}
            known = self._hashed[at] = weakref.ref(copy.segment), _hash(region.view())
        return known[1]


@dataclass(slots=True)
class _Round:
    """One `SentNames.gather`: every name is digested at most once."""

    sent: SentNames
    bound: set[str]
    digests: dict[str, bytes] = field(default_factory=dict)
    holds: dict[str, set[str]] = field(default_factory=dict)
    """By name: other names whose tensors or modules its value has."""
    _open: set[str] = field(default_factory=set)
    _visited: set[int] = field(default_factory=set)
    """Ids of the classes whose names are known."""

    def need(self, names: Iterable[str]) -> None:
        """Digest these names, and those that their values use."""
        found = self.sent.names
        for name in sorted(names, key=lambda name: (not _is_kept(found.get(name)), name)):  # a model owns its tensors
            is_known = name in self.digests or name in self._open or name in PROVIDED
            if name in found and not is_known and not name.startswith("__"):
                self._digest(name)

    def sent_name(self, name: str) -> SentName:
        return SentName(self.sent.names[name], self.digests[name], holds=tuple(self.holds.get(name, ())))

    def visit(self, definition: type, root: str) -> None:
        """Digest the names that a class uses which has no name itself."""
        if id(definition) not in self._visited:
            self._visited.add(id(definition))
            self.dump(root, definition)

    def _digest(self, name: str) -> None:
        self._open.add(name)
        try:
            digest, things = self.dump(name, self.sent.names[name])
        except Exception:
            if name in self.bound:
                return
            raise
        finally:
            self._open.discard(name)
        self.sent.own(name, digest, things)
        self.digests[name] = digest

    def dump(self, name: str, value: Any) -> tuple[bytes, list[Any]]:
        hasher = _Hasher(self.sent)
        home = _Digesting(self, name)
        pickling.Pickler(hasher, hasher, home).dump(value)
        self.need(home.used)
        return hasher.digest(), home.own


def _is_kept(obj: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, (torch.Tensor, torch.nn.Module))


class _Digesting(pickling.Home):
    """A `pickling.Home` for the digest of one name: what belongs to other names counts by its key."""

    def __init__(self, round_: _Round, name: str, is_plain: bool = False) -> None:
        self.names = round_.sent.names
        self.used: set[str] = set()
        self.own: list[Any] = []
        self._round, self._name, self._is_plain = round_, name, is_plain

    def alias_of(self, definition: Any) -> str:
        """Return a token for a class of another name, which counts by its identity; functions count by their content.

        A cell that defines a class again makes a new class; an object of the old one has not changed.
        """
        root, *parts = definition.__qualname__.split(".")
        if isinstance(definition, types.FunctionType) or definition.__module__ != "__main__" or root == self._name:
            return ""
        found = self.names.get(root)
        for part in parts:
            found = getattr(found, part, None)
        if found is definition:
            self.used.add(root)
        else:  # no name has it: redefined, decorated, or of a function
            self._round.visit(definition, root)
        return f"{definition.__qualname__} #{self._round.sent.token_of(definition)}"

    def note(self, definition: types.FunctionType | type) -> None:
        if isinstance(definition, types.FunctionType):
            self.used |= pickling.globals_used(definition).intersection(self.names)

    def key_of(self, obj: object) -> tuple[str, bool]:
        if not _is_kept(obj):
            return "", False
        owned = None if self._is_plain else self._round.sent.owner_of(obj)
        if owned is not None and owned.name != self._name:
            self._round.need([owned.name])  # its content may have changed, and with it the keys
            owned = self._round.sent.owner_of(obj)
            if owned is not None and owned.name != self._name:
                self._round.holds.setdefault(self._name, set()).add(owned.name)
                return owned.key, True
        self.own.append(obj)
        return "", False


class _Packing(pickling.Home):
    """A `pickling.Home` for the names that are sent: what stays with a name that the ranks have is a reference."""

    def __init__(self, sent: SentNames, to_send: Collection[str], plain: Collection[int] = ()) -> None:
        self.names = sent.names
        self._sent, self._to_send = sent, to_send
        self._plain = set(plain)
        """Ids of objects that are sent whole and without a key."""

    def key_of(self, obj: object) -> tuple[str, bool]:
        owned = self._sent.owner_of(obj) if _is_kept(obj) and id(obj) not in self._plain else None
        if owned is None:
            return "", False
        return owned.key, owned.name not in self._to_send and not self._sent.take_lost(owned.key)


class _Hasher(BufferSink):
    """Takes a pickle and its buffers, and keeps their digest alone."""

    def __init__(self, sent: SentNames) -> None:
        self._sent, self.is_here = sent, sent.is_here
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def digest(self) -> bytes:
        return self._hash.digest()

    def write(self, data: bytes, /) -> object:
        self._hash.update(data)
        return None

    def take(self, buffer: pickle.PickleBuffer, /) -> object:
        self._hash.update(self._sent.digest_of(region_of(buffer.raw())))
        return None

    def add_descriptor(self, fd: int, owner: object) -> pickle.PickleBuffer:
        status = os.fstat(fd)
        return pickle.PickleBuffer(b"%d %d" % (status.st_dev, status.st_ino))


def _hash(data: memoryview) -> bytes:
    found, data = hashlib.blake2b(digest_size=_DIGEST_BYTES), data.cast("B")
    for start in range(0, len(data), _CHUNK_BYTES):  # Python handles signals between chunks
        found.update(data[start : start + _CHUNK_BYTES])
    return found.digest()
