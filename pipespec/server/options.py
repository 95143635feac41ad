"""The options of a server, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipespec.errors import ConfigError
from pipespec.limits import LARGEST_PORT, MAX_COUNT, MAX_SECONDS, check_number, check_whole
from pipespec.server.host_names import ANY, is_host_pattern, normal_origin
from pipespec.server.tool_parsers.families import FAMILIES

# The size of a body: of fields, tools and schemas, and for each token of a prompt.
FIELDS_BYTES = 2**20
TOKEN_BYTES = 64
MAX_THREADS = 64
# Clients' usual headers need so many bytes.
MIN_HEADER_BYTES = 1024


@dataclass(frozen=True)
class ServerOptions:
    """The options of `pipespec serve`, named as in `vllm serve` where that has them.

    Attributes:
        names: of the model; the first one appears in replies.
        api_keys: a request must have one of them; with none every request is accepted.
        max_queued_requests, max_queued_tokens: limits of the answers that wait for their first
            token, and of their prompts' tokens; a request beyond them gets 429.
        patience: seconds for which requests wait for a cluster that does not answer.
        shutdown_timeout: seconds in which open requests may finish at shutdown.
        max_body_bytes: of a request; None: `body_limit` of the model's context.
        preparation_threads: the number of threads that prepare requests.
        preparation_timeout: seconds that a request may take to prepare: its JSON, the chat
            template, the tokenizer, the grammar.
        max_connections, max_connections_per_address: how many may be open at a time. An address
            is an IPv4 address or an IPv6 network (/64).
        max_header_bytes: of a request line and its headers, and of trailers.
        header_timeout: seconds in which a request's headers must arrive, from the opening of the
            connection or the last reply on.
        body_timeout: seconds in which its body must arrive after that.
        allowed_origins: of web pages that may send requests (CORS): scheme://host[:port], or "*".
        allowed_hosts: names by which clients may reach the server beside addresses, loopback names
            and `host`; "*.NAME" for all below one, "*" for any. With API keys and none of these
            every name is accepted.
        private_prefixes: requests share prefix-cache entries only with those of the same API key.
        tool_call_parser: the parser of the model's tool calls (`FAMILIES`); None: chosen by its
            chat template.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    patience: float = 600.0
    shutdown_timeout: float = 30.0
    max_body_bytes: int | None = None
    preparation_threads: int = 4
    preparation_timeout: float = 10.0
    max_connections: int = 2048
    max_connections_per_address: int = 1024
    max_header_bytes: int = 32 * 2**10
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    private_prefixes: bool = False
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        check_whole("--port", self.port, 0, LARGEST_PORT, "; 0 is a free one")
        check_whole("max_queued_requests", self.max_queued_requests, 1, MAX_COUNT)
        check_whole("max_queued_tokens", self.max_queued_tokens, 1, MAX_COUNT)
        if self.max_body_bytes is not None:
            check_whole("max_body_bytes", self.max_body_bytes, 1, MAX_COUNT)
        check_whole("preparation_threads", self.preparation_threads, 1, MAX_THREADS)
        check_number("preparation_timeout", self.preparation_timeout, 0.1, MAX_SECONDS)
        check_whole("max_connections", self.max_connections, 1, MAX_COUNT)
        per_address = self.max_connections_per_address
        check_whole("max_connections_per_address", per_address, 1, MAX_COUNT)
        check_whole("max_header_bytes", self.max_header_bytes, MIN_HEADER_BYTES, MAX_COUNT)
        check_number("header_timeout", self.header_timeout, 0.1, MAX_SECONDS)
        check_number("body_timeout", self.body_timeout, 0.1, MAX_SECONDS)
        check_number("patience", self.patience, 0, MAX_SECONDS)
        check_number("shutdown_timeout", self.shutdown_timeout, 0, MAX_SECONDS)
        if not all(self.names):
            raise ConfigError("--served-model-name is empty, but must be a name.")
        if self.tool_call_parser not in (None, *FAMILIES):
            raise ConfigError(
                f"--tool-call-parser is {self.tool_call_parser!r}, but must be one of "
                f"{', '.join(FAMILIES)}."
            )
        if self.private_prefixes and not self.api_keys:
            raise ConfigError(
                "--private-prefixes separates requests by their API key, but the server asks for "
                "none; give it --api-key."
            )
        for origin in self.allowed_origins:
            if origin != ANY and normal_origin(origin) is None:
                raise ConfigError(
                    f"--allowed-origins is {origin!r}, but must be an origin as browsers send it, "
                    "such as http://localhost:3000, or * for every page."
                )
        for host in self.allowed_hosts:
            if not is_host_pattern(host):
                raise ConfigError(
                    f"--allowed-hosts is {host!r}, but must be a name without a port, such as "
                    "lab.example, *.example for all names below one, or * for any."
                )
        if not all(key.isascii() and key.strip() == key and key for key in self.api_keys):
            raise ConfigError(
                "An API key is empty, or has blanks around it or letters beyond ASCII, which a "
                "header cannot carry; choose another --api-key."
            )


def body_limit(context: int) -> int:
    """The default of `max_body_bytes`: some bytes for fields, tools and schemas, and for each token
    of the context more than its text takes in JSON."""
    return FIELDS_BYTES + TOKEN_BYTES * context


def model_name(target: str) -> str:
    """The default name of a model: its folder's, or its name on the hub."""
    return target.rstrip("/").rpartition("/")[2] if target.startswith("/") else target
