"""Connections whose other end may go without a word, as when a host loses power."""

from __future__ import annotations

import socket

SILENCE_S = 30


def keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute that the host at the other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENCE_S // 3),
        (socket.TCP_KEEPINTVL, SILENCE_S // 6),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
