from pipespec.cluster.processes.fault_stats import Fault, FaultKind, FaultStats

BROKE, ENDED, GONE = FaultKind.LINK_BROKE, FaultKind.WORKER_ENDED, FaultKind.REDIS_GONE
AWAY = FaultKind.STAYED_AWAY


def test_broken_link_counts_as_worker_ended_once_the_end_is_reported() -> None:
    stats = FaultStats({})
    stats.record_fault(Fault(1, BROKE, "a/1: lost its link", 10.0))
    assert not stats.counts  # its cause may still be reported
    assert stats.reclassify(ENDED, "b/0 ended (SIGKILL)")
    stats.all_ranks_joined(12.5)
    assert stats.counts == {"faults/worker_ended": 1, "recoveries": 1, "recovery_ns": 2.5e9}
    assert not stats.reclassify(GONE, "Redis went away")  # too late
    stats.all_ranks_joined(13.0)
    assert stats.faults == [Fault(1, ENDED, "b/0 ended (SIGKILL)", 10.0)]
    assert stats.counts["recoveries"] == 1
    stats.record_fault(Fault(2, GONE, "Redis went away", 14.0))
    assert not stats.reclassify(ENDED, "b/0 ended (SIGKILL)")  # no link broke
    stats.all_ranks_joined(15.0)
    assert stats.counts["faults/redis_gone"] == 1


def test_faults_in_a_row_count_as_one_recovery_and_one_resumption() -> None:
    stats = FaultStats({})
    stats.record_fault(Fault(1, BROKE, "a", 10.0))
    stats.begin_epoch({3: 50, 4: 60})
    stats.record_fault(Fault(2, ENDED, "b", 11.0))
    assert stats.counts == {"faults/link_broke": 1}
    stats.begin_epoch({})  # the head had not begun with any
    stats.all_ranks_joined(14.0)
    stats.update_lengths({3: 50, 4: 60}, 14.5)
    assert stats.counts["resumptions"] == 0
    stats.update_lengths({3: 50, 4: 61}, 15.0)
    stats.update_lengths({3: 52, 4: 62}, 16.0)
    assert stats.counts == {
        "faults/link_broke": 1,
        "faults/worker_ended": 1,
        "recoveries": 1,
        "recovery_ns": 4 * 10**9,
        "resumptions": 1,
        "resumption_ns": 5 * 10**9,
    }


def test_lost_host_whose_place_others_take_is_one_fault() -> None:
    stats = FaultStats({})
    stats.record_fault(Fault(1, BROKE, "a/0: lost its link", 10.0))
    stats.begin_epoch({})
    stats.record_fault(Fault(2, AWAY, "b/0, b/1 stayed away", 40.0))
    stats.all_ranks_joined(42.0)
    assert stats.faults[-1].reason == "a/0: lost its link; b/0, b/1 stayed away"
    once = {"faults/stayed_away": 1, "recoveries": 1, "recovery_ns": 32 * 10**9}
    assert stats.counts == once
    stats.record_fault(Fault(3, ENDED, "another", 50.0))
    stats.all_ranks_joined(51.0)
    assert stats.counts["faults/worker_ended"] == stats.counts["faults/stayed_away"] == 1


def test_no_resumption_is_counted_without_a_running_request() -> None:
    stats = FaultStats({})
    for epoch, open_ in ((1, {}), (2, {7: 9})):
        stats.record_fault(Fault(epoch, ENDED, "a", float(epoch)))
        stats.begin_epoch(open_)
        stats.silent_lengths = {}  # the client has left
        stats.update_lengths({}, 9.0)
    assert stats.counts["resumptions"] == 0
