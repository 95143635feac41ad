"""What the launcher makes of an agent that ends, refuses or comes back."""

import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipespec.cluster.processes import agent_handle
from pipespec.cluster.processes.agent_handle import AgentHandle, WorkerDeath
from pipespec.cluster.processes.forked_workers import WorkerJob
from pipespec.config.hosts import Host
from tests.helpers.waiting import until

JOB = WorkerJob("m:f", b"", ("b/0", "b/1"), ("b/0", "b/1"), "b", logs=False)
Start = Callable[..., tuple[AgentHandle, queue.SimpleQueue[WorkerDeath]]]
PREPARING, REFUSED = '{"preparing": true}', '{"refused": "no room in /tmp"}'


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the agent of a host behind SSH; what each agent of it prints before it ends, a line or
    nothing, is given. The last one does not end."""
    monkeypatch.setattr(agent_handle, "_RETRY_S", 0.0)
    handles: list[AgentHandle] = []

    def start(
        *lines: str, job: WorkerJob | None = JOB
    ) -> tuple[AgentHandle, queue.SimpleQueue[WorkerDeath]]:
        left = list(lines)

        def spawn(*_: object, **options: Any) -> subprocess.Popen[bytes]:
            del options["alive_count"]  # of ssh
            said = left.pop(0)
            stays = "" if left else "import sys; sys.stdin.read()"
            program = f"print({said!r}, flush=True)\n{stays}" if said else stays
            pipe = subprocess.PIPE
            line = [sys.executable, "-c", program]
            return subprocess.Popen(line, stdin=pipe, stdout=pipe, **options)

        monkeypatch.setattr(agent_handle.programs, "start_module", spawn)
        deaths: queue.SimpleQueue[WorkerDeath] = queue.SimpleQueue()
        host = Host("b", "10.0.0.2", devices=("cpu", "cpu"))
        handles.append(handle := AgentHandle(host, (), None, deaths))
        if job is not None:
            handle.start_workers(job, None)
        return handle, deaths

    yield start
    for handle in handles:
        handle.stop(1.0)


def restart(handle: AgentHandle) -> None:
    """As the recovery does it, which looks again and again."""
    before = handle._agent

    def restarted() -> bool:
        handle.restart_if_lost()
        return handle._agent is not before

    until(restarted)


@pytest.mark.parametrize(
    ("lines", "deaths_of_each", "sentences"),
    [
        (["", "", "", PREPARING], 1, []),  # once, however often it is tried
        # Else a host that always fails while it starts would be tried for ever.
        ([PREPARING, PREPARING], 2, []),
        ([REFUSED, REFUSED, PREPARING], 1, ["b cannot start again: no room in /tmp"]),
    ],
    ids=["lost again", "died while it prepared", "refuses"],
)
def test_a_lost_host_is_tried_again_and_counts_once_for_each_start(
    lines, deaths_of_each, sentences, started, caplog
):
    handle, deaths = started(PREPARING, *lines)
    for _ in lines:
        restart(handle)
        assert handle.running and not handle.failed
    died = [deaths.get().worker for _ in range(deaths.qsize())]
    assert died == ["b/0", "b/1"] * deaths_of_each
    assert caplog.messages == sentences


def test_a_host_that_refuses_at_the_first_start_ends_it(started):
    handle, _ = started(REFUSED, PREPARING)
    until(lambda: handle.failed)
    assert handle.why() == "b: no room in /tmp"


def test_a_host_that_is_lost_before_it_has_a_job_is_not_started_again(started):
    handle, deaths = started(PREPARING, PREPARING, job=None)
    until(lambda: handle.reached and handle.failed)
    before = handle._agent
    handle.restart_if_lost()
    assert handle._agent is before
    assert deaths.empty()
