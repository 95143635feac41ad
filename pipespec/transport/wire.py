"""A batch as the bytes that travel between neighbours, and back. Pure packing, no I/O.

    message   [ header 8 x int64 | rows num_rows x 6 x int64 | released num_released x int64 |
                0..63 bytes | hidden states ]
    header    epoch, step, num_rows, flags, num_released, sent_ns, token (2)

The hidden states start at a multiple of 64 bytes, so that the receiver uses them where they
arrived. A message is only as long as its rows need; the receiver keeps `capacity` bytes ready.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import numpy as np
import torch

from pipespec.core import NUM_COLUMNS, Batch
from pipespec.errors import RankFailed, StaleEpoch

_EPOCH, _STEP, _NUM_ROWS, _FLAGS, _NUM_RELEASED, _SENT = range(6)
_TOKEN = slice(6, 8)
_HEADER = 8
_STOP, _HIDDEN = 1, 2
_INT = np.dtype(np.int64).itemsize
_ALIGNMENT = 64


def token(secret: str, epoch: int, purpose: str = "wire") -> tuple[int, int]:
    """What proves, in each message of an epoch, that its sender holds the cluster's secret.

    That of another purpose tells nothing of it.
    """
    digest = hmac.digest(secret.encode(), f"{purpose} {epoch}".encode(), hashlib.sha256)
    first, second = np.frombuffer(digest[:16], np.int64).tolist()
    return first, second


@dataclass(frozen=True, slots=True)
class Wire:
    """What both ends of every link of one cluster agree on.

    `inline` tells whether hidden states are part of the message or travel apart from it;
    `token` is what the function of that name made of the cluster's secret. A batch names at most
    `max_released` requests that have ended.
    """

    epoch: int
    max_rows: int
    hidden_size: int
    dtype: torch.dtype
    inline: bool = True
    token: tuple[int, int] = (0, 0)
    max_released: int = 1

    @property
    def capacity(self) -> int:
        """The length of the longest message, in bytes."""
        start = self._hidden_start(self.max_rows, self.max_released)
        return start + self._hidden_bytes(self.max_rows)

    def pack(self, batch: Batch) -> torch.Tensor:
        """The batch as a message, uint8 `[bytes]` in CPU memory, sharing nothing with it."""
        rows, hidden = len(batch), batch.hidden
        assert rows <= self.max_rows, f"{rows} rows in a batch of at most {self.max_rows}"
        assert batch.rows.shape == (rows, NUM_COLUMNS)
        assert batch.rows.dtype == np.int64
        released = len(batch.released)
        assert released <= self.max_released, f"{released} released requests"
        if hidden is not None:
            assert hidden.shape == (rows, self.hidden_size), f"hidden {tuple(hidden.shape)}"
            assert hidden.dtype == self.dtype, f"hidden {hidden.dtype}, wire {self.dtype}"

        start = self._hidden_start(rows, released)
        carried = self._hidden_bytes(rows) if hidden is not None else 0
        message = torch.empty(start + carried, dtype=torch.uint8)
        ints = message.numpy()[:start].view(np.int64)
        ints[:_HEADER] = 0
        ints[_EPOCH] = self.epoch
        ints[_STEP] = batch.step
        ints[_NUM_ROWS] = rows
        ints[_FLAGS] = _STOP * batch.stop | _HIDDEN * (hidden is not None)
        ints[_NUM_RELEASED] = released
        ints[_SENT] = batch.sent_ns
        ints[_TOKEN] = self.token
        end = _HEADER + rows * NUM_COLUMNS
        ints[_HEADER:end] = batch.rows.reshape(-1)
        ints[end : end + released] = batch.released
        if hidden is not None and carried:
            message[start:].view(self.dtype).view(rows, self.hidden_size).copy_(hidden)
        return message

    def unpack(self, message: torch.Tensor) -> Batch:
        """The batch in a message; bytes beyond its end are ignored.

        The hidden states are a view of the message. Where they travel apart, `has_hidden`
        tells whether some follow, and the batch comes without them.

        Raises:
            StaleEpoch: the message belongs to another life of the cluster.
            RankFailed: its sender does not hold the cluster's secret.
        """
        ints = self._header(message)
        if ints[_EPOCH] != self.epoch:
            raise StaleEpoch(
                f"A batch of epoch {ints[_EPOCH]} reached a rank of epoch {self.epoch}; "
                "all ranks of a cluster must be started together."
            )
        if not hmac.compare_digest(ints[_TOKEN].tobytes(), np.array(self.token).tobytes()):
            raise RankFailed(
                "A batch came from a process that does not hold the cluster's secret; keep the "
                "network of the ranks to yourself."
            )
        rows = int(ints[_NUM_ROWS])
        released = int(ints[_NUM_RELEASED])
        assert 0 <= rows <= self.max_rows, f"{rows} rows in a batch of at most {self.max_rows}"
        assert 0 <= released <= self.max_released, f"{released} released requests"
        end = rows * NUM_COLUMNS
        table = message.numpy()[_HEADER * _INT : (_HEADER + end + released) * _INT].view(np.int64)
        hidden = None
        if self.inline and self.has_hidden(message):
            start = self._hidden_start(rows, released)
            bytes_ = message[start : start + self._hidden_bytes(rows)]
            hidden = bytes_.view(self.dtype).view(rows, self.hidden_size)
        return Batch(
            step=int(ints[_STEP]),
            rows=table[:end].reshape(rows, NUM_COLUMNS).copy(),
            hidden=hidden,
            released=tuple(table[end:].tolist()),
            stop=bool(ints[_FLAGS] & _STOP),
            sent_ns=int(ints[_SENT]),
        )

    def has_hidden(self, message: torch.Tensor) -> bool:
        """Whether the batch in the message had hidden states."""
        return bool(self._header(message)[_FLAGS] & _HIDDEN)

    def _header(self, message: torch.Tensor) -> np.ndarray:
        return message.numpy()[: _HEADER * _INT].view(np.int64)

    def _hidden_start(self, rows: int, released: int) -> int:
        ints = (_HEADER + rows * NUM_COLUMNS + released) * _INT
        return -(-ints // _ALIGNMENT) * _ALIGNMENT

    def _hidden_bytes(self, rows: int) -> int:
        return rows * self.hidden_size * self.dtype.itemsize if self.inline else 0
