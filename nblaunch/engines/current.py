"""The engine that the launches of this process use: the only place that chooses one."""

from __future__ import annotations

from nblaunch.engines.local import LocalEngine
from nblaunch.engines.protocol import Engine

engine: Engine = LocalEngine()
