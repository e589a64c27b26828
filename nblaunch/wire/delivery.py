"""Delivery in order and exactly once over connections that may break: both ends of a link between two machines.

ZeroMQ reconnects by itself, but loses what was on its way. So each message has a number; the sender keeps it until the
receiver has confirmed it, and sends it again after a gap. Nothing here waits or knows a socket.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nblaunch.machine import timeouts

Part = bytes | memoryview
Parts = Sequence[Part]
"""The parts of a message."""
_HEAD = struct.Struct("!BQQQ")
_MESSAGE, _CONFIRMATION, _REQUEST = 1, 2, 3
CONFIRM_BYTES = 1 << 19
"""Received since the last confirmation before another is due."""
CONFIRM_MESSAGES = 64
"""The same in messages."""
MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 1 << 20, 8 << 20


@dataclass(slots=True)
class Delivery:
    """One end of a link.

    Attributes:
        unconfirmed_bytes: Sent and not confirmed.
        is_behind: The other end has sent messages that have not arrived: request them.
        window_bytes: How much may be unconfirmed before less urgent messages wait.
        clock: Returns the time in seconds.
    """

    unconfirmed_bytes: int = 0
    is_behind: bool = False
    window_bytes: int = MAX_WINDOW_BYTES
    clock: Callable[[], float] = time.monotonic
    _sent: int = 0
    _received: int = 0
    _kept: deque[tuple[int, Parts, float]] = field(default_factory=deque)
    """Numbers, messages, and when they were sent."""
    _bytes_to_confirm: int = 0
    _messages_to_confirm: int = 0
    _confirmed_bytes: int = 0
    """Since the window was last judged."""
    _window_since: int = 0
    """The last message that was sent under another window."""
    _round_trip_s: float = math.inf
    """The shortest seen."""

    # -------------------------------------------------------------- sending
    def wrap(self, parts: Parts) -> list[Part]:
        """Return a new message with its head, and keep it until it is confirmed."""
        self._sent += 1
        self._kept.append((self._sent, parts, self.clock()))
        self.unconfirmed_bytes += _size(parts)
        return [self._head(_MESSAGE, self._sent), *parts]

    def again(self) -> list[list[Part]]:
        """Return the messages that are not confirmed, to be sent again."""
        now = self.clock()
        self._kept = deque((number, parts, now) for number, parts, _ in self._kept)
        return [[self._head(_MESSAGE, number), *parts] for number, parts, _ in self._kept]

    def confirmation(self) -> list[Part]:
        """Return what confirms all that was received; also a sign of life."""
        return [self._head(_CONFIRMATION, 0)]

    def request(self) -> list[Part]:
        """Return what asks the other end to send again what was not received."""
        self.is_behind = False
        return [self._head(_REQUEST, 0)]

    def _head(self, kind: int, number: int) -> bytes:
        self._bytes_to_confirm = self._messages_to_confirm = 0
        return _HEAD.pack(kind, number, self._received, self._sent)

    # -------------------------------------------------------------- receiving
    @property
    def owes_confirmation(self) -> bool:
        """Return True if the other end may wait for a confirmation before it sends more."""
        return self._bytes_to_confirm >= CONFIRM_BYTES or self._messages_to_confirm >= CONFIRM_MESSAGES

    def take(self, parts: Parts) -> Literal["new", "old", "request"]:
        """Note what has arrived, with its head: ``new`` is a message to act on, ``request`` wants `again` sent.

        Raises:
            ValueError: It has no valid head.
        """
        try:
            kind, number, confirmed, sent = _HEAD.unpack(parts[0])
        except (IndexError, struct.error) as error:
            raise ValueError("not a message of nblaunch") from error
        self._take_confirmation(confirmed)
        if kind == _MESSAGE and number == self._received + 1:
            self._received = number
            self._bytes_to_confirm += _size(parts)
            self._messages_to_confirm += 1
            return "new"
        self.is_behind = sent > self._received and (kind == _CONFIRMATION or number > self._received)
        return "request" if kind == _REQUEST else "old"

    def _take_confirmation(self, confirmed: int) -> None:
        size, sent_at = 0, 0.0
        while self._kept and self._kept[0][0] <= confirmed:
            _, parts, sent_at = self._kept.popleft()
            size += _size(parts)
        self.unconfirmed_bytes -= size
        self._confirmed_bytes += size
        if not size or self._confirmed_bytes < CONFIRM_BYTES:  # a few bytes are confirmed long after they have arrived
            return
        self._confirmed_bytes = 0
        if confirmed <= self._window_since:  # it was sent under an earlier window
            return
        took = self.clock() - sent_at
        self._round_trip_s = min(self._round_trip_s, took)
        waited = took - self._round_trip_s
        if waited > timeouts.LINK_WINDOW_S:
            self._set_window(int(self.window_bytes * timeouts.LINK_WINDOW_S / waited))
        elif waited < timeouts.LINK_WINDOW_S / 2:
            self._set_window(2 * self.window_bytes)

    def _set_window(self, size: int) -> None:
        self.window_bytes = max(MIN_WINDOW_BYTES, min(size, MAX_WINDOW_BYTES))
        self._window_since = self._sent


def _size(parts: Parts) -> int:
    return sum(map(len, parts))
