"""A server process on a cluster of its own, and clients of it."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.sandbox import PATIENCE_S, Sandbox

MODEL = "demo"
NAME = "lab"  # of the cluster


class Server:
    """`pipespec serve` as a process, once it answers."""

    def __init__(self, place: Sandbox, *arguments: str, model: str = MODEL, **how: Any):
        usual = ("--json", "--port", "0", "--served-model-name", model)
        self.process: subprocess.Popen[str] = place.start("serve", *usual, *arguments, **how)
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        self.announced: dict[str, Any] = json.loads(line)
        self.url: str = self.announced["url"].removesuffix("/v1")
        self.http = httpx2.Client(base_url=self.url, timeout=PATIENCE_S)

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, timeout=PATIENCE_S, max_retries=0, **options
        )

    def metric(self, name: str) -> float:
        """A metric of /metrics: the sum of all samples of this name."""
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        found = [line for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        assert found, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def counted(self) -> dict[tuple[str, ...], float]:
        """All values of /metrics that must never decrease, by name and labels."""
        text = self.http.get("/metrics").raise_for_status().text
        return {
            (sample.name, *map(str, sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            if family.type in ("counter", "histogram", "summary")
            for sample in family.samples
        }

    def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end with [DONE]."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            text = reply.read().decode()
        events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
        assert all(event.startswith("data: ") for event in events)
        data = [event.removeprefix("data: ") for event in events]
        assert data[-1] == "[DONE]"
        return [json.loads(each) for each in data[:-1]]

    def end(self) -> int:
        """Terminate the server; its exit code."""
        self.http.close()
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        return self.process.returncode


@contextmanager
def serving(place: Sandbox, *arguments: str, model: str = MODEL) -> Iterator[Server]:
    """A server that ends with the block."""
    server = Server(place, *arguments, model=model)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def cluster_up(folder: Path, *settings: str, name: str = NAME) -> Iterator[Sandbox]:
    """A sandbox with a running cluster; its processes end with the block."""
    with Sandbox(folder) as place:
        code, _, err = place.run("up", "--detach", "--name", name, *settings)
        assert (code, err) == (0, "")
        yield place
