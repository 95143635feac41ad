"""A cluster over the hosts of a test bed, in a process on its first host, and requests to it.

    python -m tools.rig.driver OVERRIDE ...

is that process. Each line of its input is {"settings": [...], "at": N}: the prompt is decoded with
these `decode.*` and `sampling.*` settings; with "at" it pauses after so many tokens, until the next
line. Each line of its output is one of {"ready": workers}, {"log": worker, "line": ...}, {"at":
tokens so far} and {"tokens": [...]}. The end of its input ends the cluster.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.controller.log_records import Accepted
from tools.rig.requests import RequestClient, running
from tools.rig.testbed import Testbed

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
PROMPT = "Once upon a time there was a king who had three sons and"

_sending = threading.Lock()


class Driver:
    """A cluster over the hosts of a test bed, started from host a, whose first worker is the head.

    `devices` are so many of each host; `settings` are further ones.
    """

    def __init__(self, bed: Testbed, devices: Mapping[str, int], *settings: str):
        self.bed = bed
        hosts_file = bed.hosts_file(devices=devices, draft="a/0")
        chosen = [f"cluster={hosts_file}", "decode.ignore_eos=true", "model.context=256", *settings]
        self.process = bed.popen(
            "a",
            [sys.executable, "-m", "tools.rig.driver", *chosen],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hear("ready")

    def hear(self, what: str) -> dict[str, Any]:
        """The next message that has this field."""
        assert self.process.stdout is not None
        heard = []
        for line in self.process.stdout:
            message: dict[str, Any] = json.loads(line)
            if what in message:
                return message
            heard.append(line)
        raise AssertionError("the cluster ended: " + "".join(heard[-20:]))

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ask(self, settings: list[str], at: int = 0) -> list[int]:
        """The answer; with `at` nothing, once so many tokens have come."""
        self.say({"settings": settings, "at": at})
        return [] if at and self.hear("at") else self.hear("tokens")["tokens"]

    def end(self) -> int:
        """Its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)


def leftovers(bed: Testbed, host: str, *others: bytes) -> list[int]:
    """Processes in a host that are not its SSH server: Python's, or those of the others' names."""
    found = []
    for pid in set(bed.processes(host)) - bed.servers:
        with suppress(FileNotFoundError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(name in line for name in (b"python", *others)):
                found.append(pid)
    return found


# --- in the cluster's process ------------------------------------------------------------------


def send(message: dict[str, Any]) -> None:
    with _sending:
        print(json.dumps(message), flush=True)


def answer(client: RequestClient, settings: list[str], at: int) -> list[int]:
    """The tokens of an answer."""
    config = compose(settings)
    prompt, length = client.served.encode(PROMPT), config.decode.max_new_tokens
    request = client.submit(prompt, config.sampling.params(0), max_new_tokens=length)
    tokens: list[int] = []
    for event in client.events(request):
        if isinstance(event, Accepted):
            before, tokens = len(tokens), [*tokens, *event.tokens]
            if before < at <= len(tokens):
                send({"at": len(tokens)})
                sys.stdin.readline()
    return tokens


def main() -> None:
    deployment = decide(compose(sys.argv[1:]))
    on_log = lambda m, line: send({"log": m, "line": line})  # noqa: E731
    with running(deployment, on_log=on_log) as (cluster, client):
        send({"ready": cluster.deployment.workers})
        for line in sys.stdin:
            send({"tokens": answer(client, **json.loads(line))})


if __name__ == "__main__":
    main()
