"""The table in which the ranks of an epoch publish the addresses of their links."""

from __future__ import annotations

from collections.abc import Sequence

from pipespec.controller.lua_scripts import evalsha, load
from pipespec.controller.redis_connection import RedisClient


class LinkAddressTable(RedisClient):
    """Values by name, which are deleted with their epoch. Not for several threads. Raises
    Unreachable whenever Redis is gone."""

    def __init__(self, url: str, namespace: str, epoch: int):
        super().__init__(url, namespace)
        self._table = (self._keys.epoch, self._keys.link_addresses(epoch))
        self._epoch = epoch
        load(self._pipe)

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = self._pipe.call("HMGET", self._table[-1], *names)
        return found

    def write(self, name: str, value: bytes) -> None:
        """Set a value. Raises StaleEpoch."""
        # Fenced: what is written after the epoch has ended would stay for good.
        self._pipe.call(*evalsha("set_epoch_fields", self._table, self._epoch, name, value))
