"""How a server is run, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipespec.errors import ConfigError
from pipespec.limits import LARGEST_PORT, MAX_COUNT, MAX_SECONDS, check_number, check_whole
from pipespec.server.tools.families import FAMILIES


@dataclass(frozen=True)
class ServerOptions:
    """The options of `pipespec serve`, as `vllm serve` calls them where it has them.

    Attributes:
        names: under which the model is asked for, the one that replies show first.
        api_keys: any of which lets a client ask; none: everybody may.
        max_queued_requests, max_queued_tokens: answers that wait for their first token, and the
            tokens of their prompts; more is refused with 429.
        patience: seconds for which requests wait for a cluster that is away.
        shutdown_timeout: seconds in which what runs may finish once the server is to end.
        max_body_bytes: of a request.
        allowed_origins: of web pages that may ask (CORS).
        tool_call_parser: how the model's calls of tools are read (`FAMILIES`); None: as its chat
            template tells.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    patience: float = 600.0
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 32 * 2**20
    allowed_origins: tuple[str, ...] = ()
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        check_whole("--port", self.port, 0, LARGEST_PORT, "; 0 is a free one")
        check_whole("--max-queued-requests", self.max_queued_requests, 1, MAX_COUNT)
        check_whole("--max-queued-tokens", self.max_queued_tokens, 1, MAX_COUNT)
        check_number("--patience", self.patience, 0, MAX_SECONDS)
        check_number("--shutdown-timeout", self.shutdown_timeout, 0, MAX_SECONDS)
        if not all(self.names):
            raise ConfigError("--served-model-name is empty, but must be a name.")
        if self.tool_call_parser not in (None, *FAMILIES):
            raise ConfigError(
                f"--tool-call-parser is {self.tool_call_parser!r}, but must be one of "
                f"{', '.join(FAMILIES)}."
            )
        if not all(key.isascii() and key.strip() == key and key for key in self.api_keys):
            raise ConfigError(
                "An API key is empty, or has blanks around it or letters beyond ASCII, which a "
                "header cannot carry; choose another --api-key."
            )


def model_name(target: str) -> str:
    """What a model is called that was not given a name: as its folder, or on the hub."""
    return target.rstrip("/").rpartition("/")[2] if target.startswith("/") else target
