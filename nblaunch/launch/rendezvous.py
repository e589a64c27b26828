"""Where the ranks of one launch meet: a store that the kernel serves on a loopback port of its own.

torch's TCPStore listens on every interface whatever MASTER_ADDR says, and a port that is picked first and bound
later can be taken in between. So we bind and listen here, on 127.0.0.1 and whatever port is free, and hand the
listening socket to the store. Ranks are its clients, as under torchrun.

Loopback keeps other machines out, and not other users of this one, for torch has no means to. Its client connects to a
host and a port alone, so the store can be no Unix socket, and its server asks for no password. A filter on the
listening socket, once the ranks are there, would also cut off what torch connects later (``Store.clone``). And with
the store closed gloo would still be open: it takes the first connection that sends a pair's number, a small integer.
"""

from __future__ import annotations

import datetime
import socket
from types import TracebackType

from nblaunch.launch.plan import MASTER_ADDR

_TIMEOUT = datetime.timedelta(seconds=300)


class Rendezvous:
    """The store of one attempt. Close it when the ranks have gone."""

    def __init__(self, world_size: int) -> None:
        from torch.distributed import TCPStore

        listener = socket.socket(socket.AF_INET)
        try:
            listener.bind((MASTER_ADDR, 0))
            listener.listen(max(128, 4 * world_size))
            self.port: int = listener.getsockname()[1]
            self._store: object | None = TCPStore(
                MASTER_ADDR,
                self.port,
                world_size,
                is_master=True,
                timeout=_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
                use_libuv=True,
            )
            listener.detach()  # it is the store's now
        finally:
            listener.close()

    def close(self) -> None:
        self._store = None  # its destructor ends the thread and closes the socket

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
