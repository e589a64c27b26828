"""The versions that must be the same on every node, and what to do if they are not."""

from __future__ import annotations

import socket
import sys
from importlib import metadata

from nblaunch.wire.link_messages import LINK_PROTOCOL, Versions


def versions_here() -> Versions:
    """Return the versions of this process."""
    python = ".".join(map(str, sys.version_info[:2]))
    packages = _version_of("torch"), _version_of("cloudpickle")
    return Versions(LINK_PROTOCOL, _version_of("nblaunch"), python, *packages, host=socket.gethostname())


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from its sources
        return "none"


def difference(there: Versions, here: Versions) -> str:
    """Return how a node differs from the notebook, and what to do; empty if it does not."""
    if there.nblaunch != here.nblaunch or there.protocol != here.protocol:
        return f"has nblaunch {there.nblaunch}, and the notebook {here.nblaunch}: install the same on both"
    for name in ("python", "torch", "cloudpickle"):
        theirs, ours = getattr(there, name), getattr(here, name)
        if theirs == ours:
            continue
        if name == "python":
            return f"has Python {theirs}, and the notebook {ours}: start the agents with the notebook's Python"
        return f"has {name} {theirs}, and the notebook {ours}: pip install {name}=={ours.partition('+')[0]} there"
    return ""
