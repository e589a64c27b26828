"""The rendezvous of one group: a TCPStore that the kernel serves on a loopback port.

torch's TCPStore listens on every interface, whatever MASTER_ADDR says, and a port that is chosen before it is bound can
be taken meanwhile. So we bind 127.0.0.1 and a free port here, and hand the listening socket to the store. Ranks are its
clients, as under torchrun.

Loopback keeps other machines out, but not other users of this one. torch offers no way to: its client takes only a host
and a port, which rules out a Unix socket, and its server has no authentication. Closing the listener once all ranks are
connected would break ``Store.clone``. gloo would stay open in any case: it accepts the first connection that sends the
number of a pair, a small integer.
"""

from __future__ import annotations

import datetime
import os
import socket
from types import TracebackType

from nblaunch.engines.protocol import Store
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import LOOPBACK


class Rendezvous:
    """The store of one group. Close it after the ranks have exited."""

    def __init__(self, world_size: int, address: str = LOOPBACK) -> None:
        from torch.distributed import TCPStore

        with socket.socket(socket.AF_INET) as listener:
            listener.bind((address, 0))
            listener.listen(max(128, 4 * world_size))
            port: int = listener.getsockname()[1]
            self.store = Store(address, port)
            self._served: object | None = TCPStore(
                address,
                port,
                world_size,
                is_master=True,
                timeout=datetime.timedelta(seconds=timeouts.RENDEZVOUS_TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=os.dup(
                    listener.fileno()
                ),  # the store closes it, perhaps before an interrupt is raised
                use_libuv=True,
            )

    def close(self) -> None:
        """Stop serving."""
        self._served = None  # its destructor ends the thread and closes the socket

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
