from collections.abc import Sequence

import pytest

from pipespec.errors import StaleEpoch
from pipespec.transport.rendezvous_store import RendezvousStore


class EndingTable:
    """A table whose epoch ends, and whose values are deleted, after `num_reads` reads."""

    def __init__(self, num_reads: int):
        self.num_reads = num_reads

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        self.num_reads -= 1
        return [None if self.num_reads < 0 else name.encode() for name in names]

    def write(self, name: str, value: bytes) -> None:
        raise AssertionError("nothing is written here")

    def check(self) -> None:
        if self.num_reads < 0:
            raise StaleEpoch("The epoch is over.")


def test_values_deleted_with_their_epoch_end_the_wait_for_them() -> None:
    table = EndingTable(num_reads=1)
    store = RendezvousStore(table, table.check)
    assert store.get("0") == b"0"
    with pytest.raises(StaleEpoch):
        store.get("0")
    with pytest.raises(StaleEpoch):
        store.wait(["0", "1"])
