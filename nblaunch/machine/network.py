"""The addresses of this machine: which one reaches another machine, and on which interface it is."""

from __future__ import annotations

import ipaddress
import socket

from nblaunch.errors import ArgumentError

_ANY_PORT = 9
"""Of a connection that is never used: the system only chooses a route."""


def address_towards(peer: str) -> str:
    """Return the address of this machine from which it reaches another.

    Args:
        peer: The other machine's IPv4 address or name.

    Raises:
        OSError: The name does not resolve, or there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, _ANY_PORT))
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address; empty if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return str(name)
    return ""


def checked_address(name: str, value: str) -> str:
    """Return an IPv4 address of this machine.

    Args:
        name: The setting that has it, for the error.
        value: The address.

    Raises:
        ArgumentError: It is not an address of this machine.
    """
    try:
        ipaddress.IPv4Address(value)
    except ValueError:
        raise ArgumentError(f"{name}={value!r}: must be an IPv4 address of this machine") from None
    if not interface_of(value):
        raise ArgumentError(f"{name}={value!r}: no network interface of this machine has this address")
    return value
