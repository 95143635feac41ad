"""Origins and host names, as options and the headers of requests have them."""

from __future__ import annotations

import ipaddress
import re

from pipespec.limits import LARGEST_PORT

ANY = "*"
_ORIGIN = re.compile(
    r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", re.IGNORECASE
)
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{0,5})?", re.IGNORECASE)
# A value of `--allowed-hosts`: a name, or all names below one.
_HOST_PATTERN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}


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


def is_host_pattern(text: str) -> bool:
    """Whether `--allowed-hosts` can have this value: a name without a port, "*.NAME" or "*"."""
    return text == ANY or _HOST_PATTERN.fullmatch(text) is not None


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
