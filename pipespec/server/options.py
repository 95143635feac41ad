"""The options of a server, and origins and host names as they and the headers of requests have
them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any

from pipespec.errors import ConfigError
from pipespec.limits import LARGEST_PORT, MAX_COUNT, MAX_SECONDS, check_whole
from pipespec.server.tool_parsers.families import FAMILIES
from pipespec.settings import check_settings, setting

ANY = "*"
_ORIGIN = re.compile(
    r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", re.IGNORECASE
)
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{0,5})?", re.IGNORECASE)
# A value of `--allowed-hosts`: a name, or all names below one.
_HOST_PATTERN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}
# The size of a body: of fields, tools and schemas, and for each token of a prompt.
FIELDS_BYTES = 2**20
TOKEN_BYTES = 64
# Characters of a model's name and of a key, which a request's headers must have room for.
LONGEST_MODEL_NAME, LONGEST_KEY = 512, 1024


def limit(default: float | None, least: float, most: float = MAX_COUNT) -> Any:
    """An option that `--limit` sets, of at least and at most so much."""
    return setting(default, "", limits=(least, most))


def seconds(default: float, shortest: float = 0.1) -> Any:
    return limit(default, shortest, MAX_SECONDS)


@dataclass(frozen=True)
class ServerOptions:
    """The options of `pipespec serve`, as `vllm serve` names them if it has them; docs/serving.md
    describes them.

    Attributes:
        names: of the model; the first one appears in replies.
        key_names: of the keys, in the access log, which has a line for each request.
        max_queued_requests, max_queued_tokens: limits of the answers that wait for their first
            token, and of their prompts' tokens.
        patience: seconds for which requests wait for a cluster that does not answer.
        max_body_bytes: of a request; None: `body_limit` of the model's context.
        preparation_timeout: seconds that a request may take to prepare: its JSON, the chat
            template, the tokenizer, the grammar.
        max_connections_per_address: an IPv4 address or an IPv6 network (/64).
        max_header_bytes: of a request line and its headers, and of trailers.
        header_timeout: seconds in which a request's headers must arrive, from the opening of the
            connection or the last reply on; `body_timeout`: its body after that.
        answers: the folder of an `AnswerRecord`; "": none.
        private_prefixes: requests share prefix-cache entries only with those of the same API key.
        tool_call_parser: one of `FAMILIES`; None: chosen by the model's chat template.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_names: tuple[str, ...] = ()
    access_log: bool = False
    max_queued_requests: int = limit(1024, 1)
    max_queued_tokens: int = limit(1_000_000, 1)
    patience: float = seconds(600.0, 0)
    shutdown_timeout: float = seconds(30.0, 0)
    max_body_bytes: int | None = limit(None, 1)
    preparation_threads: int = limit(4, 1, 64)
    preparation_timeout: float = seconds(10.0)
    max_connections: int = limit(2048, 1)
    max_connections_per_address: int = limit(1024, 1)
    max_header_bytes: int = limit(32 * 2**10, 1024)  # clients' usual headers need so many
    header_timeout: float = seconds(10.0)
    body_timeout: float = seconds(60.0)
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    answers: str = ""
    private_prefixes: bool = False
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        check_whole("--port", self.port, 0, LARGEST_PORT, "; 0 is a free one")
        check_settings("", self)
        for name in self.names:
            if not 0 < len(name) <= LONGEST_MODEL_NAME or not name.isprintable():
                raise ConfigError(
                    f"--served-model-name is empty, or has more than {LONGEST_MODEL_NAME} "
                    "characters or some that cannot be printed; choose another name."
                )
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
            if host != ANY and not _HOST_PATTERN.fullmatch(host):
                raise ConfigError(
                    f"--allowed-hosts is {host!r}, but must be a name without a port, such as "
                    "lab.example, *.example for all names below one, or * for any."
                )
        for key in self.api_keys:
            plain = key.isascii() and key.isprintable() and key.strip() == key
            if not plain or not 0 < len(key) <= LONGEST_KEY:
                raise ConfigError(
                    "An API key is empty, or has blanks around it, letters beyond ASCII or more "
                    f"than {LONGEST_KEY}, which a header cannot carry; choose another --api-key."
                )


def body_limit(context: int) -> int:
    """The default of `max_body_bytes`: some bytes for fields, tools and schemas, and for each token
    of the context more than its text takes in JSON."""
    return FIELDS_BYTES + TOKEN_BYTES * context


# --- origins and hosts --------------------------------------------------------------------------


def normal_origin(text: str) -> str | None:
    """An origin as browsers write it: lower case, without the scheme's default port. None: the
    text is no origin ("null" is none)."""
    found = _ORIGIN.fullmatch(text)
    if found is None:
        return None
    scheme, host, port = found[1].lower(), found[2].lower(), found[3]
    if port is None:
        return f"{scheme}://{host}"
    number = int(port)
    if not 0 < number <= LARGEST_PORT:
        return None
    return f"{scheme}://{host}{'' if _DEFAULT_PORTS.get(scheme) == number else f':{number}'}"


def host_name(header: str) -> str | None:
    """The name or address in a Host header; None: it has none."""
    found = _HOST.fullmatch(header)
    return None if found is None else normal_name(found[1])


def normal_name(name: str) -> str:
    """A host's name as it is compared: lower case, without the dot of the root."""
    return name.lower().removesuffix(".")


def is_address(name: str) -> bool:
    """Whether a host is named by an address, which no page can have resolve to another."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
