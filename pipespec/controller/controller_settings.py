"""The settings of the controller: which Redis the ranks use."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipespec.errors import ConfigError
from pipespec.limits import LARGEST_PORT
from pipespec.settings import REQUIRED, check_settings, setting
from pipespec.system.validation import shown

# The values of controller.tls.
AUTO, OFF = "auto", "off"
URL_SCHEMES = ("redis", "rediss", "unix")
NAMESPACE = re.compile(r"[A-Za-z0-9_.-]+")
LONGEST_NAMESPACE = 128  # it is in every key


@dataclass(frozen=True)
class ControllerConfig:
    """Which Redis the ranks use."""

    # It may hold a password.
    url: str | None = setting(
        REQUIRED,
        "Your Redis: redis://, rediss:// or unix://, with user and password if it needs them; null "
        "starts a private server for this cluster.",
        visible=False,
    )
    namespace: str = setting("pipespec", "First part of every key in Redis.")
    port: int = setting(
        0,
        "TCP port of the private server for other hosts; 0 is a free one.",
        limits=(0, LARGEST_PORT),
        hint="; 0 is a free one",
    )
    data: str | None = setting(
        None,
        "Folder where the private server keeps requests and answers after the cluster has ended; "
        "`up` and `serve` keep them in one of their own until an orderly end.",
    )
    tls: str = setting(
        AUTO,
        "TLS between other hosts and the private server: auto makes a certificate for this "
        "cluster, off is plain TCP.",
        choices=(AUTO, OFF),
    )

    def __post_init__(self) -> None:
        check_settings("controller", self)
        if self.data == "":
            raise ConfigError("controller.data is empty, but must name a folder or be null.")
        if self.url is not None:
            private = {"port": self.port, "data": self.data, "tls": self.tls != AUTO}
            for name, given in private.items():
                if given:
                    raise ConfigError(
                        f"controller.{name} is for the private server, but controller.url (as in "
                        "controller=url) names another: leave one of them out."
                    )
            scheme, separator, _ = self.url.partition("://")
            # The URL itself may hold a password, so no message repeats it.
            if not separator or scheme not in URL_SCHEMES:
                raise ConfigError(
                    "controller.url must begin with redis://, rediss:// or unix://, "
                    "as in redis://user:password@host:6379/0."
                )
        if not NAMESPACE.fullmatch(self.namespace) or len(self.namespace) > LONGEST_NAMESPACE:
            raise ConfigError(
                f"controller.namespace is {shown(self.namespace)}, but must be at most "
                f"{LONGEST_NAMESPACE} letters, digits, '_', '-' and '.'."
            )
