"""Where a server's open requests come from, for the dashboard.

Only this server knows that: it is in no log, and is forgotten when the request ends. A request and
its tokens are shown only to clients that send the API key with which it came.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.requests import Request

from pipespec.server.response_stream import ResponseStream

# The header of replies that names the request: its number in the cluster's log, and of several
# answers that of the first. `/events?request=` and `/requests/{request}/cancel` take it.
REQUEST_NUMBER = "X-Pipespec-Request"
MAX_AGENT = 120  # characters of a client's name for itself


@dataclass(frozen=True)
class RequestOrigin:
    """Where a request comes from.

    Attributes:
        client: the address of the client.
        agent: its name for itself (`User-Agent`).
        preview: the beginning of what it asks.
        api_key_digest: of its API key; empty if the server asks for none.
    """

    client: str
    agent: str
    preview: str
    api_key_digest: bytes

    @classmethod
    def of(cls, request: Request, preview: str) -> RequestOrigin:
        """The origin of an HTTP request that asks this."""
        client = request.client.host if request.client else ""
        agent = request.headers.get("user-agent", "")[:MAX_AGENT]
        return cls(client, agent, preview, request.state.api_key_digest)

    @property
    def shown(self) -> dict[str, str]:
        """What a dashboard shows of it."""
        return {"client": self.client, "agent": self.agent, "preview": self.preview}


class OpenRequests:
    """The requests that a server answers now, with their origins."""

    def __init__(self) -> None:
        self._origins: dict[ResponseStream, RequestOrigin] = {}

    def __iter__(self) -> Iterator[ResponseStream]:
        return iter([*self._origins])

    def add(self, stream: ResponseStream, origin: RequestOrigin) -> None:
        self._origins[stream] = origin

    def discard(self, stream: ResponseStream) -> None:
        self._origins.pop(stream, None)

    def origins(self, api_key_digest: bytes) -> dict[int, RequestOrigin]:
        """The origins of the requests with an API key, by their numbers in the cluster's log."""
        return {
            number: origin
            for stream, origin in self._origins.items()
            if hmac.compare_digest(origin.api_key_digest, api_key_digest)
            for number in stream.numbers
        }

    def may_watch(self, number: int, api_key_digest: bytes) -> bool:
        """Whether the tokens of a request may be shown to a client with this API key: if the server
        asks for keys, only those of open requests that came here with the same one."""
        return not api_key_digest or number in self.origins(api_key_digest)
