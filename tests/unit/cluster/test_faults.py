"""What a record of faults counts, and when."""

from __future__ import annotations

from collections import Counter

from pipespec.cluster.faults import Fault, FaultKind, FaultRecord

BROKE, ENDED, GONE = FaultKind.LINK_BROKE, FaultKind.WORKER_ENDED, FaultKind.REDIS_GONE


def test_a_link_that_broke_as_a_worker_had_ended_counts_as_its_end() -> None:
    record = FaultRecord({})
    record.note(Fault(1, BROKE, "a/1: lost its link", 10.0))
    assert not record.counts  # it may turn out why
    record.explain(ENDED)
    record.complete(12.5)
    assert record.counts == {"faults/worker_ended": 1, "recoveries": 1, "recovery_ns": 2.5e9}
    record.explain(GONE)  # too late
    record.complete(13.0)
    assert [fault.kind for fault in record.faults] == [ENDED]
    assert record.counts["recoveries"] == 1


def test_only_a_broken_link_is_explained() -> None:
    record = FaultRecord({})
    record.explain(ENDED)  # nothing has happened
    record.note(Fault(1, GONE, "Redis went away", 10.0))
    record.explain(ENDED)
    record.complete(11.0)
    assert record.counts["faults/redis_gone"] == 1


def test_faults_in_a_row_are_one_recovery_and_one_silence() -> None:
    record = FaultRecord({})
    record.note(Fault(1, BROKE, "a", 10.0))
    record.begun({3: 50, 4: 60})
    record.note(Fault(2, ENDED, "b", 11.0))
    assert record.counts == {"faults/link_broke": 1}
    record.begun({})  # the head had not begun with any
    record.complete(14.0)
    record.heard({3: 50, 4: 60}, 14.5)
    assert record.counts["resumptions"] == 0
    record.heard({3: 50, 4: 61}, 15.0)
    record.heard({3: 52, 4: 62}, 16.0)
    assert record.counts == {
        "faults/link_broke": 1,
        "faults/worker_ended": 1,
        "recoveries": 1,
        "recovery_ns": 4 * 10**9,
        "resumptions": 1,
        "resumption_ns": 5 * 10**9,
    }


def test_without_an_answer_there_is_no_silence() -> None:
    record = FaultRecord({})
    for epoch, open_ in ((1, {}), (2, {7: 9})):
        record.note(Fault(epoch, ENDED, "a", float(epoch)))
        record.begun(open_)
        record.leave()  # who asked has left
        record.heard({}, 9.0)
    assert record.counts["resumptions"] == 0


def test_what_was_counted_before_is_gone_on_with() -> None:
    known = {"faults/link_broke": 4, "recoveries": 3, "recovery_ns": 7, "steps": 900}
    record = FaultRecord(known)
    assert record.counts == Counter({"faults/link_broke": 4, "recoveries": 3, "recovery_ns": 7})
    record.note(Fault(9, BROKE, "a", 1.0))
    record.complete(1.0)
    assert record.counts["faults/link_broke"] == 5
