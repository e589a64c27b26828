"""`get_logger`: Python's logger, on the main process unless a call says otherwise."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from nblaunch.training.collectives import barrier
from nblaunch.training.topology import world


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls take two more arguments.

    ``main_process_only`` (default True): log on rank 0 only. ``in_order`` (default False): log on every rank, one after
    another; then the call is a collective.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        only_main, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)
        place = world()
        for rank in range(place.size) if in_order else [place.rank]:
            if rank == place.rank and (in_order or not only_main or rank == 0):
                super().log(level, msg, *args, **kwargs)
            if in_order:
                barrier()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"[RANK {world().rank}] {msg}", kwargs


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return the logger of this name, see `RankLogger`. It works before and without an `Accelerator`.

    Args:
        name: As for ``logging.getLogger``.
        log_level: The level to set, such as ``"INFO"``. Default: as it is.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return RankLogger(logger, {})
