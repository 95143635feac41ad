"""`pipespec status --watch` on a terminal, of a cluster that comes and goes."""

from __future__ import annotations

import signal
from dataclasses import replace

from pipespec.client import registry
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import Owner, RunningCluster
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import Controller
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.head.policies.root import Root
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.system.folders import resource_dir
from tests.helpers.sandbox import Sandbox
from tests.helpers.screen import CURSOR, on_screen

NAME = "lab"


def test_the_numbers_are_renewed_and_a_cluster_that_is_away_is_waited_for(
    place: Sandbox, server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    served = ModelInfo(str(resource_dir("demo")), 512, 64, (), BackendTokenizer("{}"))
    cluster = RunningCluster(
        *(NAME, server.url, namespace, 1, Owner.this(), "alpha", (), served),
        num_ranks=1,
        started=0.0,
    )
    with registry.claim(NAME):
        registry.publish(cluster)
        with on_screen(place, "status", "--watch", NAME) as screen:
            screen.wait("ready")
            say(head, tokens=8)
            screen.wait("2.00 tokens per step")
            say(head, tokens=20)
            screen.wait("5.00 tokens per step")
            gone = registry.publish(replace(cluster, url="unix:///nowhere/redis.sock"))
            screen.wait("no answer")
            gone.unlink()
            screen.wait("loading")
            registry.publish(cluster)
            screen.wait("ready")
            screen.wait("ready")
            assert screen.interrupt(signal.SIGINT) == 128 + signal.SIGINT
            assert CURSOR in screen.shown
            assert "Traceback" not in screen.text


def test_a_cluster_whose_name_is_free_meanwhile_is_away(place: Sandbox) -> None:
    with registry.claim(NAME), on_screen(place, "status", NAME, "--watch") as screen:
        screen.wait("loading")
        (registry.folder() / (NAME + registry.LOCK)).unlink()
        screen.wait("away")
        assert "No cluster named 'lab' is up" in screen.text
        assert screen.interrupt(signal.SIGTERM) == 128 + signal.SIGTERM


def say(head: Controller, tokens: int) -> None:
    """A head has decided so many tokens in four steps."""
    scheduler = Scheduler(SchedulerConfig(Root(), 1, 1, 4, 64))
    head.publish_statistics(
        scheduler.statistics(), scheduler.counts() | {"steps": 4, "tokens": tokens}
    )
