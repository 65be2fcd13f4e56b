"""Where a server listens. Apart from the server itself, because a port in use is to be known before torch is imported."""

from __future__ import annotations

import socket

from fathomlm.errors import OptionError


def bind(host: str, port: int) -> socket.socket:
    """A socket of its own, so that a port that is taken is known before the model is loaded. Port 0 is any free one."""
    if not 0 <= port <= 65535:
        raise OptionError(f"a port is a number from 0 to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"cannot listen at {host}: {error.strerror}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise OptionError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --host or --port") from error
    return found


def address_of(sock: socket.socket) -> str:
    """http://host:port"""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
