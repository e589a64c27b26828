"""A saved state's folder: written whole or not at all, with a manifest."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import socket
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from nblaunch.errors import ArgumentError
from nblaunch.machine.processes import alive
from nblaunch.training.states.checkpoint import flush

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(?P<kind>new|old|partial)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a complete folder; in its file ``manifest.json``, which is written last."""

    kinds: dict[str, list[str]]
    """The type's name of each object that was saved, by ``"model"``, ``"optimizer"``, ``"scheduler"``, ``"object"``."""
    sizes: dict[str, int]
    """The bytes of each file, by its path in the folder."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            ArgumentError: The folder is missing, is not a saved state, or its manifest is damaged.
        """
        name = f"input_dir={str(folder)!r}"
        if not folder.is_dir():
            raise ArgumentError(f"{name}: there is no such folder")
        path = folder / MANIFEST
        if not path.is_file():
            raise ArgumentError(f"{name}: it has no {MANIFEST}, so save_state did not write it, or not to its end")
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"{name}: its {MANIFEST} is damaged: load another folder") from error

    def check_files(self, folder: Path, part: int, parts: int) -> None:
        """Check that the files are there, with their sizes and, for a part of them, the checksums that torch writes.

        Args:
            folder: The saved state.
            part: Which of the parts to check, from 0: each rank has one.
            parts: Their number.

        Raises:
            ArgumentError: A file is not; the message names it.
        """
        for file, size in self.sizes.items():
            path = folder / file
            there = path.stat().st_size if path.is_file() else None
            if there is None:
                state = "missing"
            elif there != size:
                state = f"damaged: it has {there} bytes instead of {size}"
            elif path.parent == folder and path.suffix == ".pt" and not _is_intact(path, part, parts):
                state = "damaged: its content differs from what was written"
            else:
                continue
            raise ArgumentError(f"input_dir={str(folder)!r}: its file {file} is {state}. Load another folder")


def _is_intact(path: Path, part: int, parts: int) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            for tensor in archive.infolist()[part::parts]:
                with archive.open(tensor) as content:
                    while content.read(_CHUNK_BYTES):  # compares the checksum at the end
                        pass
        return True
    except (zipfile.BadZipFile, EOFError, NotImplementedError):  # the table of contents itself is damaged
        return False


class StateFolder:
    """A folder that is written beside its final place, and moved there once it is complete.

    All methods are for the process that writes: rank 0.

    Attributes:
        target: The final place.
        scratch: The folder to write into.
    """

    def __init__(self, target: Path) -> None:
        self.target, self.scratch = target, _beside(target, "partial")

    @classmethod
    def begin(cls, target: Path) -> StateFolder:
        """Make the folder to write into, and remove those of writers that were killed.

        Args:
            target: The final place. An earlier saved state there is replaced; other files in it stay.

        Raises:
            ArgumentError: The target is a file, or a folder with files that no saved state accounts for.
        """
        if target.exists() and not target.is_dir():
            raise ArgumentError(f"output_dir={str(target)!r}: it is a file: give a folder")
        if target.is_dir() and Path.cwd().is_relative_to(target.resolve()):
            raise ArgumentError(f"output_dir={str(target)!r}: it is the current folder: give a folder of its own")
        if target.is_dir() and (others := sorted(os.listdir(target))) and not is_state(target):
            raise ArgumentError(
                f"output_dir={str(target)!r}: save_state replaces the folder, and did not write what is in it "
                f"({', '.join(others[:3])}): give a folder of its own, such as {str(target / 'state')!r}"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        repair(target)
        for path, writer in _unfinished(target.parent):
            if writer["kind"] == "partial" and _has_ended(writer):
                shutil.rmtree(path, ignore_errors=True)  # another process may remove it too
        begun = cls(target)
        begun.scratch.mkdir()
        if target.is_dir():
            shutil.copymode(target, begun.scratch)
        return begun

    def complete(self, kinds: dict[str, list[str]]) -> None:
        """Write the manifest, flush everything to the disk, and move the folder to its place."""
        files = sorted(path for path in self.scratch.rglob("*") if path.is_file())
        sizes = {path.relative_to(self.scratch).as_posix(): path.stat().st_size for path in files}
        manifest = Manifest(kinds, sizes)
        (self.scratch / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
        for path in (*files, self.scratch / MANIFEST, *_folders(self.scratch)):
            flush(path)
        if not self.target.exists():
            self.scratch.rename(self.target)
        else:
            ready, before = _beside(self.target, "new"), _beside(self.target, "old")
            try:
                self.scratch.rename(ready)
                if not _exchange(ready, self.target):
                    self.target.rename(before)
                    ready.rename(self.target)
            finally:  # after an interrupt too
                repair(self.target)
        flush(self.target.parent)

    def discard(self) -> None:
        """Remove what was written, if it was not completed."""
        shutil.rmtree(self.scratch, ignore_errors=True)


def is_state(folder: Path) -> bool:
    """Return True for a complete saved state, and not for a folder with another program's ``manifest.json``."""
    try:
        Manifest.read(folder)
    except ArgumentError:
        return False
    return True


def repair(target: Path) -> None:
    """Finish a replacement of `target` by a writer that has ended, and if it is missing, by one on another machine.

    If `target` is missing, the new state takes its place, else that from before. All other ones are removed.
    """
    for path, writer in sorted(_unfinished(target.parent), key=lambda found: found[1]["kind"]):  # "new" before "old"
        if writer["kind"] == "partial" or writer["name"] != target.name:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if not target.exists() and (_has_ended(writer) or writer["host"] != _host()):
                path.rename(target)
            elif _has_ended(writer):
                _retire(path, target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders' names in one step (Linux, ``renameat2``); return False where that is impossible."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    current, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(current, os.fsencode(one), current, os.fsencode(other), exchange) == 0


def _retire(before: Path, target: Path) -> None:
    """Remove a replaced state, and keep other files that were in its folder."""
    own = {MANIFEST}
    with contextlib.suppress(ArgumentError):  # an empty folder, or a damaged manifest
        own |= {file.split("/")[0] for file in Manifest.read(before).sizes}
    for path in list(before.iterdir()):
        if path.name not in own and not (target / path.name).exists():
            path.rename(target / path.name)
    shutil.rmtree(before)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{_host()}.{os.getpid()}.{kind}")


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _unfinished(parent: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in parent.glob(".*"):
        if (match := _UNFINISHED.fullmatch(path.name)) is not None:
            yield path, match


def _has_ended(writer: re.Match[str]) -> bool:
    """Return True if a folder's writer is not running; another machine's may be."""
    pid = int(writer["pid"])
    return writer["host"] == _host() and (pid == os.getpid() or not alive(pid))


def _folders(top: Path) -> list[Path]:
    return [top, *(path for path in top.rglob("*") if path.is_dir())]
