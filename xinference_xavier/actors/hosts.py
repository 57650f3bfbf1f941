"""Where actors listen, and whether two of them are on one machine.

Standard library only; any process, any thread; nothing here sends a packet.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"

#: The discard port: connecting a datagram socket to it asks the routing table, and sends nothing.
_DISCARD_PORT = 9


def host_of(address: str | None) -> str | None:
    """The host of an xoscar address ``[scheme://]host:port``; None without an address."""
    if not address:
        return None
    return address.rpartition("://")[2].rpartition(":")[0] or None


def is_loopback(host: str) -> bool:
    """Whether only this machine's processes reach ``host``. A name other than localhost may not."""
    return host == "localhost" or _matches(host, "is_loopback")


def is_unspecified(host: str) -> bool:
    """Whether ``host`` means every interface of a listener: ``0.0.0.0`` or ``::``."""
    return _matches(host, "is_unspecified")


def _matches(host: str, attribute: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host.strip("[]")), attribute))
    except ValueError:
        return False


def interface_towards(host: str | None) -> str:
    """The address of this machine from which ``host`` is reached; loopback if it is not known.

    Asks the routing table; a name is resolved first.
    """
    if host is None or is_unspecified(host):
        return LOOPBACK
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), _DISCARD_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.connect(address)
            return str(asking.getsockname()[0])
    except OSError:
        return LOOPBACK


def machine_id() -> str:
    """This machine's network in short: what has the same reaches the same loopback interface.

    Two containers on one machine differ unless they share a network. Where the system tells
    neither (it is not Linux), the host's name has to do.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
