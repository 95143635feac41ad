"""Parsers of the dialects, answers as a cluster gives them, and the fields that an SDK sends."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import Owner, RunningCluster
from pipespec.server.dialect import body_routes
from pipespec.server.options import ServerOptions
from pipespec.server.preparation import PreparedRequest, Preparer
from pipespec.server.reply_format import OutputDelta


def entry_of(served: ModelInfo) -> RunningCluster:
    """The registry's entry of a cluster that serves a model."""
    return RunningCluster(
        "lab", "", "nobody", 1, Owner.this(), "here", (), served, num_ranks=5, started=1.0
    )


def preparer(served: ModelInfo, *overrides: str) -> Preparer:
    running = replace(entry_of(served), overrides=overrides)
    return Preparer(running, ServerOptions(("demo",))).warmed_up()


def prepared(preparer: Preparer, path: str, body: dict[str, Any]) -> PreparedRequest:
    """A request that generates text, as a server prepares it."""
    result = preparer.prepare(path, json.dumps(body).encode())
    assert isinstance(result, PreparedRequest)
    return result


def shape_of(served: ModelInfo, preparer: Preparer, path: str, body: dict[str, Any]) -> Any:
    """What makes the replies to a request."""
    request, make = prepared(preparer, path, body), body_routes()[path].format
    return make(request.parsed, served.tokenizer, "demo", **request.options)


def prompt_of(served: ModelInfo, request: PreparedRequest) -> str:
    """The prompt as text."""
    return served.tokenizer.decode(request.parsed.prompts[0])


def parts(*texts: str) -> list[dict[str, str]]:
    """A message's content as parts."""
    return [{"type": "text", "text": text} for text in texts]


def deltas(
    text: str,
    *,
    reason: Any = "stop",
    stop: str | None = None,
    cached: int | None = 3,
    step: int = 5,
) -> list[OutputDelta]:
    """An answer in pieces, each of one token."""
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    made = [OutputDelta(0, piece, (i,)) for i, piece in enumerate(pieces)]
    end = OutputDelta(0, "", finish_reason=reason, stop_string=stop, num_cached_tokens=cached)
    return [*made, end]


def stream_of(reply_format: Any, answer: Sequence[OutputDelta]) -> list[bytes]:
    """All events of a stream."""
    events = [*reply_format.first_events()]
    for delta in answer:
        events += reply_format.events(delta)
    return [*events, *reply_format.last_events()]


def chunks(events: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON of events without names."""
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def whole_of(reply_format: Any, answer: Sequence[OutputDelta]) -> Any:
    """The whole reply, as JSON."""
    for delta in answer:
        reply_format.add(delta)
    return json.loads(to_json(reply_format.response()))
