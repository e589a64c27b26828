"""What waits to be sent over a link: urgent messages first, then the lanes in turn, as far as the window allows.

A lane keeps the order of its messages. What it holds is read when its turn comes: a result of 1 GB is never in memory
twice, and a peer that does not read stalls nothing else. Some messages of a lane go before all others of all lanes.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from nblaunch.wire.delivery import Delivery, Part

_log = logging.getLogger(__name__)

Message = tuple[object, Sequence[Part]]
"""A message, and the bytes beside it."""
Source = tuple[Iterator[Message], Callable[[str], None]]
"""Of messages, and what is called with the reason if it fails."""
Lanes = dict[str, deque[Source]]


def encoded(message: object, buffers: Sequence[Part] = ()) -> list[Part]:
    """Return the parts of a message."""
    return [pickle.dumps(message, protocol=5), *buffers]


class Outbox:
    """See the module. Used from one thread.

    Args:
        delivery: Numbers what is sent.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._urgent: deque[list[Part]] = deque()
        self._first: Lanes = {}
        """What goes before all in `_lanes`."""
        self._lanes: Lanes = {}

    def put(self, message: object, buffers: Sequence[Part] = ()) -> None:
        """Queue an urgent message, which overtakes those in lanes."""
        self.put_encoded(encoded(message, buffers))

    def put_encoded(self, parts: list[Part]) -> None:
        """Queue an urgent message that is encoded."""
        self._urgent.append(parts)

    def put_in(
        self,
        lane: str,
        messages: Iterable[Message],
        on_error: Callable[[str], None] = lambda reason: None,
        *,
        goes_first: bool = False,
    ) -> None:
        """Queue messages behind those that the lane holds.

        Args:
            lane: The lane.
            messages: A source, which is read when its turn comes.
            on_error: Called with the reason if the source fails. Default: nothing.
            goes_first: Whether they go before all that do not. Default: False.
        """
        lanes = self._first if goes_first else self._lanes
        lanes.setdefault(lane, deque()).append((iter(messages), on_error))

    def drop(self, lane: str) -> None:
        """Forget what a lane holds."""
        self._first.pop(lane, None)
        self._lanes.pop(lane, None)

    @property
    def is_empty(self) -> bool:
        """Return True if nothing waits."""
        return not (self._urgent or self._first or self._lanes)

    def due(self) -> Iterator[list[Part]]:
        """Yield the messages that may be sent now, with their heads."""
        while self._urgent:
            yield self._delivery.wrap(self._urgent.popleft())
        while (lanes := self._first or self._lanes) and self._delivery.unconfirmed_bytes < self._delivery.window_bytes:
            name, lane = next(iter(lanes.items()))
            lanes[name] = lanes.pop(name)  # the other lanes come first next time
            parts = self._next_of(lane)
            if parts is not None:
                yield self._delivery.wrap(parts)
            elif not lane:
                lanes.pop(name, None)

    def _next_of(self, lane: deque[Source]) -> list[Part] | None:
        """Return the next message of a lane; None if its first source has none left."""
        source, on_error = lane[0]
        try:
            return encoded(*next(source))
        except StopIteration:
            lane.popleft()
        except Exception as error:  # noqa: BLE001  # a source that fails must not end the link, or a node is lost
            _log.exception("nblaunch: something could not be sent over a link")
            lane.popleft()
            on_error(f"{type(error).__name__}: {error}")
        return None
