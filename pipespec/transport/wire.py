"""The wire format of a batch. Packing and unpacking only, no I/O.

    message   [ header 15 x int64 | rows num_rows x 6 x int64 | finished x int64 |
                preempted x int64 | failed x int64 | retained x 2 x int64 | kept x 3 x int64 |
                started | 0..63 bytes | hidden states | 0..7 bytes ]
    header    epoch, step, num_rows, flags, num_finished, num_preempted, num_failed, num_retained,
              num_kept, started_ints, sent_ns, token (2), columns of the hidden states (0: there are
              none), bytes of the message
    retained  sequence, number of its tokens that are retained
    kept      sequence, number of tokens behind which its running state is kept, number of that
    started   for each sequence: sequence, request, prompt_len, committed_len, parent, shared_len,
              length of params, int64 each; then params, padded to a multiple of 8 bytes

The hidden states start at a multiple of 64 bytes, so that the receiver can use them in place. A
message is only as long as its rows need; the receiver keeps `capacity` bytes ready.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from pipespec.core import MAX_STARTED_BYTES, NUM_COLUMNS, Batch, SequenceStart
from pipespec.errors import RankFailed, StaleEpoch

_EPOCH, _STEP, _NUM_ROWS, _FLAGS, _NUM_FINISHED, _NUM_PREEMPTED, _NUM_FAILED = range(7)
_NUM_RETAINED, _NUM_KEPT, _STARTED, _SENT = range(7, 11)
_TOKEN = slice(11, 13)
_COLUMNS, _BYTES = 13, 14
_HEADER = 15
_START = 7  # integers before the params of a sequence start
_STOP, _BESIDE = 1, 2
_INT = np.dtype(np.int64).itemsize
_ALIGNMENT = 64


def token(secret: str, epoch: int) -> tuple[int, int]:
    """The token that every message of an epoch carries: only a holder of the cluster's secret can
    compute it. In a sealed message it is encrypted, so it is never sent in the clear between
    hosts."""
    digest = hmac.digest(secret.encode(), f"wire {epoch}".encode(), hashlib.sha256)
    first, second = np.frombuffer(digest[:16], np.int64).tolist()
    return first, second


@dataclass(frozen=True, slots=True)
class Wire:
    """The parameters of the wire format, the same for every link of a cluster. A batch has at
    most `max_rows` rows, `max_columns` columns of hidden states with all that is behind them,
    `max_finished` sequences that leave, finished or preempted, as many that fail, and changes of
    `max_retained` retained prefixes and `max_kept` running states."""

    epoch: int
    max_rows: int
    max_columns: int
    dtype: torch.dtype
    token: tuple[int, int] = (0, 0)
    max_finished: int = 1
    max_retained: int = 0
    max_kept: int = 0

    @property
    def capacity(self) -> int:
        tail = 2 * self.max_finished + 2 * self.max_retained + 3 * self.max_kept
        tail += MAX_STARTED_BYTES // _INT
        start = self._hidden_start(self.max_rows, tail)
        return start + self._hidden_bytes(self.max_rows, self.max_columns)

    def pack(self, batch: Batch, *, pinned: bool = False) -> torch.Tensor:
        """The batch as a message, uint8 `[bytes]` in CPU memory; a copy."""
        rows, hidden = len(batch), batch.hidden
        assert rows <= self.max_rows, f"{rows} rows in a batch of at most {self.max_rows}"
        assert batch.rows.shape == (rows, NUM_COLUMNS)
        assert batch.rows.dtype == np.int64
        leaving = (*batch.finished, *batch.preempted)
        assert len(leaving) <= self.max_finished, f"{len(leaving)} sequences leave"
        assert len(batch.failed) <= self.max_finished, f"{len(batch.failed)} sequences fail"
        assert len(batch.retained_prefixes) <= self.max_retained, (
            f"{len(batch.retained_prefixes)} retained prefixes"
        )
        assert len(batch.kept_states) <= self.max_kept, f"{len(batch.kept_states)} kept states"
        changes = chain.from_iterable((*batch.retained_prefixes, *batch.kept_states))
        sequence_ints = (*leaving, *batch.failed, *changes)
        started = b"".join(map(_pack_start, batch.started))
        assert len(started) <= MAX_STARTED_BYTES, f"{len(started)} bytes of sequence starts"
        tail = len(sequence_ints) + len(started) // _INT
        columns = 0 if hidden is None else hidden.shape[1]
        if hidden is not None:
            assert hidden.shape == (rows, columns), f"hidden {tuple(hidden.shape)}"
            assert 0 < columns <= self.max_columns, f"{columns} columns"
            assert hidden.dtype == self.dtype, f"hidden {hidden.dtype}, wire {self.dtype}"

        start = self._hidden_start(rows, tail)
        size = start + self._hidden_bytes(rows, columns)
        message = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        ints = message.numpy()[:start].view(np.int64)
        flags = _STOP * batch.stop | _BESIDE * batch.beside
        leave = len(batch.finished), len(batch.preempted), len(batch.failed)
        keep = len(batch.retained_prefixes), len(batch.kept_states)
        sent = len(started) // _INT, batch.sent_ns, *self.token, columns, size
        ints[:_HEADER] = (self.epoch, batch.step, rows, flags, *leave, *keep, *sent)
        end = _HEADER + rows * NUM_COLUMNS
        ints[_HEADER:end] = batch.rows.reshape(-1)
        ints[end : end + len(sequence_ints)] = sequence_ints
        ints[end + len(sequence_ints) : end + tail] = np.frombuffer(started, np.int64)
        if hidden is not None:
            self._hidden_of(message, start, rows, columns).copy_(hidden)
        return message

    def unpack(self, message: torch.Tensor) -> Batch:
        """The batch in a message; bytes beyond its end are ignored. The hidden states are a view of
        the message. Raises StaleEpoch for a message of another epoch, and RankFailed if its sender
        does not hold the cluster's secret."""
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
        counts = ints[_NUM_FINISHED : _STARTED + 1].tolist()
        finished, preempted, failed, retained, kept, started = counts
        end = rows * NUM_COLUMNS
        present = finished + preempted
        leaving = present + failed
        states_at = leaving + 2 * retained
        sequence_ints = states_at + 3 * kept
        tail = sequence_ints + started
        start, columns = self._hidden_start(rows, tail), int(ints[_COLUMNS])
        size = start + self._hidden_bytes(rows, columns)
        assert 0 <= rows <= self.max_rows, f"{rows} rows in a batch of at most {self.max_rows}"
        assert 0 <= columns <= self.max_columns, f"{columns} columns of {self.max_columns} at most"
        assert size <= ints[_BYTES] <= len(message), f"{size} bytes in a message of {ints[_BYTES]}"
        table = message.numpy()[_HEADER * _INT : (_HEADER + end + tail) * _INT].view(np.int64)
        leaving_numbers = table[end : end + leaving].tolist()
        prefixes = table[end + leaving : end + states_at].reshape(retained, 2).tolist()
        states = table[end + states_at : end + sequence_ints].reshape(kept, 3).tolist()
        hidden = self._hidden_of(message, start, rows, columns) if columns else None
        return Batch(
            step=int(ints[_STEP]),
            rows=table[:end].reshape(rows, NUM_COLUMNS).copy(),
            hidden=hidden,
            started=tuple(_unpack_starts(table[end + sequence_ints :])),
            finished=tuple(leaving_numbers[:finished]),
            preempted=tuple(leaving_numbers[finished:present]),
            failed=tuple(leaving_numbers[present:]),
            retained_prefixes=tuple((sequence, tokens) for sequence, tokens in prefixes),
            kept_states=tuple((sequence, tokens, number) for sequence, tokens, number in states),
            beside=bool(ints[_FLAGS] & _BESIDE),
            stop=bool(ints[_FLAGS] & _STOP),
            sent_ns=int(ints[_SENT]),
        )

    def _header(self, message: torch.Tensor) -> np.ndarray:
        return message.numpy()[: _HEADER * _INT].view(np.int64)

    def _hidden_start(self, rows: int, tail: int) -> int:
        """The offset of the hidden states after so many rows and `tail` more integers, in bytes."""
        ints = (_HEADER + rows * NUM_COLUMNS + tail) * _INT
        return -(-ints // _ALIGNMENT) * _ALIGNMENT

    def _hidden_of(
        self, message: torch.Tensor, start: int, rows: int, columns: int
    ) -> torch.Tensor:
        """The hidden states in a message, `[rows, columns]`."""
        size = rows * columns * self.dtype.itemsize
        return message[start : start + size].view(self.dtype).view(rows, columns)

    def _hidden_bytes(self, rows: int, columns: int) -> int:
        """Their size in a message, rounded up to a multiple of 8 bytes."""
        return -(-rows * columns * self.dtype.itemsize // _INT) * _INT


def _pack_start(start: SequenceStart) -> bytes:
    params = start.params
    first = start.sequence, start.request, start.prompt_len, start.committed_len
    numbers = np.array((*first, start.parent, start.shared_len, len(params)), np.int64)
    return numbers.tobytes() + params + bytes(-len(params) % _INT)


def _unpack_starts(ints: np.ndarray) -> Iterator[SequenceStart]:
    while len(ints):
        sequence, request, prompt, committed_len, parent, shared, length = ints[:_START].tolist()
        end = _START + -(-length // _INT)
        params = ints[_START:end].tobytes()[:length]
        yield SequenceStart(sequence, request, prompt, committed_len, params, parent, shared)
        ints = ints[end:]
