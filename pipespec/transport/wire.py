"""A batch as the bytes that travel between neighbours, and back. Pure packing, no I/O.

    message   [ header 12 x int64 | rows num_rows x 6 x int64 | released x int64 |
                preempted x int64 | kept x 2 x int64 | opened | 0..63 bytes | hidden states |
                0..7 bytes | end ]
    header    epoch, step, num_rows, flags, num_released, num_preempted, num_kept, opened_ints,
              sent_ns, token (2), bytes of the message
    end       the first part of the token and the step, by exclusive or
    kept      sequence, tokens of its text that stay
    opened    sequence, request, prompt, known, parent, shared, length of terms: int64 each; the
              terms, up to a multiple of 8 bytes; and the next

The hidden states start at a multiple of 64 bytes, so that the receiver uses them where they
arrived. A message is only as long as its rows need; the receiver keeps `capacity` bytes ready.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from pipespec.core import MAX_OPENED_BYTES, NUM_COLUMNS, Batch, Opening
from pipespec.errors import RankFailed, StaleEpoch

_EPOCH, _STEP, _NUM_ROWS, _FLAGS, _NUM_RELEASED, _NUM_PREEMPTED, _NUM_KEPT, _OPENED = range(8)
_SENT = 8
_TOKEN = slice(9, 11)
_BYTES = 11
_HEADER = 12
_OPENING = 7  # integers before an opening's terms
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
    `max_released` sequences that leave, and says of at most `max_kept` how much of their text
    stays.
    """

    epoch: int
    max_rows: int
    hidden_size: int
    dtype: torch.dtype
    inline: bool = True
    token: tuple[int, int] = (0, 0)
    max_released: int = 1
    max_kept: int = 0

    @property
    def capacity(self) -> int:
        """The length of the longest message, in bytes."""
        tail = self.max_released + 2 * self.max_kept + MAX_OPENED_BYTES // _INT
        start = self._hidden_start(self.max_rows, tail)
        return start + self._hidden_bytes(self.max_rows) + _INT

    def pack(self, batch: Batch, *, pinned: bool = False) -> torch.Tensor:
        """The batch as a message, uint8 `[bytes]` in CPU memory, sharing nothing with it."""
        rows, hidden = len(batch), batch.hidden
        assert rows <= self.max_rows, f"{rows} rows in a batch of at most {self.max_rows}"
        assert batch.rows.shape == (rows, NUM_COLUMNS)
        assert batch.rows.dtype == np.int64
        leaving = (*batch.released, *batch.preempted)
        assert len(leaving) <= self.max_released, f"{len(leaving)} sequences leave"
        assert len(batch.kept) <= self.max_kept, f"the text of {len(batch.kept)} sequences stays"
        told = (*leaving, *chain.from_iterable(batch.kept))
        opened = b"".join(map(_pack_opening, batch.opened))
        assert len(opened) <= MAX_OPENED_BYTES, f"{len(opened)} bytes of openings"
        tail = len(told) + len(opened) // _INT
        if hidden is not None:
            assert hidden.shape == (rows, self.hidden_size), f"hidden {tuple(hidden.shape)}"
            assert hidden.dtype == self.dtype, f"hidden {hidden.dtype}, wire {self.dtype}"

        start = self._hidden_start(rows, tail)
        carried = self._hidden_bytes(rows) if hidden is not None else 0
        size = start + carried + _INT
        message = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        whole = message.numpy()
        whole[-_INT:].view(np.int64)[0] = self.token[0] ^ batch.step
        ints = whole[:start].view(np.int64)
        ints[:_HEADER] = 0
        ints[_EPOCH] = self.epoch
        ints[_STEP] = batch.step
        ints[_NUM_ROWS] = rows
        ints[_FLAGS] = _STOP * batch.stop | _HIDDEN * (hidden is not None)
        ints[_NUM_RELEASED] = len(batch.released)
        ints[_NUM_PREEMPTED] = len(batch.preempted)
        ints[_NUM_KEPT] = len(batch.kept)
        ints[_OPENED] = len(opened) // _INT
        ints[_SENT] = batch.sent_ns
        ints[_TOKEN] = self.token
        ints[_BYTES] = size
        end = _HEADER + rows * NUM_COLUMNS
        ints[_HEADER:end] = batch.rows.reshape(-1)
        ints[end : end + len(told)] = told
        ints[end + len(told) : end + tail] = np.frombuffer(opened, np.int64)
        if hidden is not None and carried:
            self._hidden_of(message, start, rows).copy_(hidden)
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
        released, preempted, kept, opened = ints[_NUM_RELEASED : _OPENED + 1].tolist()
        assert 0 <= rows <= self.max_rows, f"{rows} rows in a batch of at most {self.max_rows}"
        assert 0 <= released + preempted <= self.max_released, "too many sequences leave"
        assert 0 <= kept <= self.max_kept, "the text of too many sequences stays"
        assert 0 <= opened * _INT <= MAX_OPENED_BYTES, f"{opened} integers of openings"
        end = rows * NUM_COLUMNS
        leaving = released + preempted
        told = leaving + 2 * kept
        tail = told + opened
        table = message.numpy()[_HEADER * _INT : (_HEADER + end + tail) * _INT].view(np.int64)
        left = table[end : end + leaving].tolist()
        stays = table[end + leaving : end + told].reshape(kept, 2).tolist()
        hidden = None
        if self.inline and self.has_hidden(message):
            start = self._hidden_start(rows, tail)
            hidden = self._hidden_of(message, start, rows)
        return Batch(
            step=int(ints[_STEP]),
            rows=table[:end].reshape(rows, NUM_COLUMNS).copy(),
            hidden=hidden,
            opened=tuple(_unpack_openings(table[end + told :])),
            released=tuple(left[:released]),
            preempted=tuple(left[released:]),
            kept=tuple((sequence, tokens) for sequence, tokens in stays),
            stop=bool(ints[_FLAGS] & _STOP),
            sent_ns=int(ints[_SENT]),
        )

    def expect(self, message: torch.Tensor) -> None:
        """Make ready a message that is about to come, for `arrived`."""
        self._header(message)[:] = 0

    def arrived(self, message: torch.Tensor) -> bool:
        """Whether it seems that all of an expected message has come, while it is being written.

        No more than a hint: who reads it makes sure.
        """
        header = self._header(message)
        step, size = int(header[_STEP]), int(header[_BYTES])
        if not _HEADER * _INT < size <= self.capacity or size % _INT:
            return False
        end = message.numpy()[size - _INT : size].view(np.int64)
        return int(end[0]) == self.token[0] ^ step

    def has_hidden(self, message: torch.Tensor) -> bool:
        """Whether the batch in the message had hidden states."""
        return bool(self._header(message)[_FLAGS] & _HIDDEN)

    def _header(self, message: torch.Tensor) -> np.ndarray:
        return message.numpy()[: _HEADER * _INT].view(np.int64)

    def _hidden_start(self, rows: int, tail: int) -> int:
        """Where they start behind so many rows and `tail` more integers."""
        ints = (_HEADER + rows * NUM_COLUMNS + tail) * _INT
        return -(-ints // _ALIGNMENT) * _ALIGNMENT

    def _hidden_of(self, message: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """The hidden states in a message that carries them, `[rows, hidden]`."""
        size = rows * self.hidden_size * self.dtype.itemsize
        return message[start : start + size].view(self.dtype).view(rows, self.hidden_size)

    def _hidden_bytes(self, rows: int) -> int:
        """What they take in a message, which ends at a multiple of an integer's."""
        size = rows * self.hidden_size * self.dtype.itemsize if self.inline else 0
        return -(-size // _INT) * _INT


def _pack_opening(opening: Opening) -> bytes:
    terms = opening.terms
    asked = opening.sequence, opening.request, opening.prompt, opening.known
    numbers = np.array((*asked, opening.parent, opening.shared, len(terms)), np.int64)
    return numbers.tobytes() + terms + bytes(-len(terms) % _INT)


def _unpack_openings(ints: np.ndarray) -> Iterator[Opening]:
    while len(ints):
        sequence, request, prompt, known, parent, shared, length = ints[:_OPENING].tolist()
        end = _OPENING + -(-length // _INT)
        terms = ints[_OPENING:end].tobytes()[:length]
        yield Opening(sequence, request, prompt, known, terms, parent, shared)
        ints = ints[end:]
