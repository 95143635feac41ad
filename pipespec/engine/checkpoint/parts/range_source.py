"""Where parts of files are read from: the Hugging Face Hub, a mirror of it, or another host.

All are URLs that answer range requests. What may pass (a cut connection, a slow answer, 429, 5xx, a
body of the wrong length) is tried again, from the byte that was reached; what remains is one
sentence. Ids, tokens, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the HTTP client are those of
huggingface_hub.
"""

from __future__ import annotations

import random
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

from pipespec.engine.checkpoint.parts.folder import Repository, StoredFile
from pipespec.engine.checkpoint.parts.parts_file import Range
from pipespec.errors import ModelError

# Seconds to wait for a connection, to a host that may be read through the launcher, and for the
# next bytes of an answer.
CONNECT_S, HOST_CONNECT_S, READ_S = 10.0, 5.0, 30.0
# Tries without a byte of progress, also of a host, and the seconds between them, which double.
MAX_TRIES, HOST_TRIES = 6, 2
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
# A server may ask for a longer wait (Retry-After), up to this many seconds.
LONGEST_ASKED_S = 300.0
PASSING = (408, 425, 429, 500, 502, 503, 504)
TOKEN = "authorization"  # the header that holds it
COMMIT = re.compile("[0-9a-f]{40}")
# Called with the bytes of an answer as they come.
Sink = Callable[[bytes], object]


class Unavailable(ModelError):
    """A source cannot be read, now or from here; `why`, as a clause."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or message


class _Again(Exception):
    """A request failed in a way that may pass; `wait_s` is what the server asks for."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


def host_session(context: ssl.SSLContext) -> Any:
    """A client for sources that are other hosts, which prove by the context who they are."""
    from huggingface_hub import utils

    return type(utils.get_session())(verify=context, trust_env=False)  # type: ignore[attr-defined]


class RangeSource:
    """Files at URLs, which need no token. Several threads may read at once.

    Args:
        session: that of `host_session`, for another host; None: that for the hub.
        wait: called with the seconds between two tries; None: wait so long.
    """

    def __init__(
        self,
        name: str,
        urls: Mapping[str, str],
        session: Any = None,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        from huggingface_hub import utils

        self.name, self._urls = name, urls
        self.stopped = threading.Event()  # set by others, to end all reading soon
        self._wait = self.stopped.wait if wait is None else wait
        self._session = session or utils.get_session()  # type: ignore[attr-defined]
        host = session is not None
        self._max_tries = HOST_TRIES if host else MAX_TRIES
        self._connect_s = HOST_CONNECT_S if host else CONNECT_S

    def locate(self, file: str) -> tuple[str, Mapping[str, str]]:
        """The URL of a file, and headers for it."""
        return self._urls[file], {}

    def forget(self, file: str) -> None:
        """The signed URL of a file is refused. Raises Unavailable if there is no other."""
        raise Unavailable(f"{self.name} refuses a signed URL of {file}")

    def read(self, file: str, part: Range, size: int, sink: Sink) -> None:
        """Read a part of a file of `size` bytes. Raises ModelError, Unavailable."""
        at, stop = part

        def take(chunk: bytes) -> None:
            nonlocal at
            if at + len(chunk) > stop:
                raise _Again("it sends more bytes than were asked for")
            at += len(chunk)
            sink(chunk)

        def ask() -> None:
            self._request(file, (at, stop), size, take)
            if at < stop:
                raise _Again("it ended the answer early")

        self._tried(ask, file, self._max_tries, lambda: at)

    def _request(self, file: str, part: Range, size: int, sink: Sink) -> None:
        from huggingface_hub import utils

        start, stop = part
        url, headers = self.locate(file)
        wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        timeout = (self._connect_s, READ_S, READ_S, None)  # connect, read, write, free connection
        with self._session.stream(
            "GET", url, headers={**headers, **wanted}, timeout=timeout, follow_redirects=False
        ) as answer:
            if TOKEN not in headers and answer.status_code in (401, 403):
                self.forget(file)
                raise _Again(f"its signed URL is refused ({answer.status_code})")
            utils.hf_raise_for_status(answer)  # type: ignore[attr-defined]
            whole = answer.status_code == 200
            if whole and part != (0, size):
                raise _Again("it does not send parts of files (range requests)")
            stated, found = f"bytes {start}-{stop - 1}/{size}", answer.headers.get("Content-Range")
            if not whole and (found or "").strip() != stated:
                raise _Again(f"it sends the range {found!r} for {stated!r}")
            length = answer.headers.get("Content-Length", "").strip()
            if length and length != str(stop - start):
                raise _Again(f"it sends {length} bytes where {stop - start} were asked for")
            for chunk in answer.iter_raw():
                sink(chunk)

    def _tried(
        self,
        ask: Callable[[], Any],
        what: str,
        max_tries: int = MAX_TRIES,
        progress: Callable[[], int] = lambda: 0,
    ) -> Any:
        """Ask until there is an answer. Raises ModelError, or Unavailable after too many tries
        without progress."""
        tries, before = 0, progress()
        while True:
            try:
                with self._translated():
                    return ask()
            except _Again as error:
                tries = tries + 1 if progress() == before else 1
                before = progress()
                if self.stopped.is_set():
                    raise Unavailable(f"reading from {self.name} was stopped") from error
                if tries >= max_tries or error.wait_s > LONGEST_ASKED_S:
                    raise Unavailable(
                        f"{self.name} did not send {what}, though asked {tries} times: {error}; "
                        "check the network, or try again later",
                        str(error),
                    ) from error
                backoff = min(FIRST_WAIT_S * 2 ** (tries - 1), LONGEST_WAIT_S)
                self._wait(max(backoff * random.uniform(0.75, 1.25), error.wait_s))

    def _refused(self, status: int) -> str:
        return f"{self.name} answers {status}; start again"

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise ModelError, Unavailable or _Again in place of huggingface_hub's errors."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        # The HTTP library is httpx or httpx2, by the version of huggingface_hub.
        names: dict[str, Any] = {each.__name__: each for each in HfHubHTTPError.__mro__}
        try:
            yield
        except OfflineModeIsEnabled as error:
            raise Unavailable("HF_HUB_OFFLINE is set") from error
        except HFValidationError as error:
            raise ModelError(f"{self.name!r} is no name of a model on the hub") from error
        except names["HTTPError"] as error:
            if (answer := getattr(error, "response", None)) is None:
                raise _Again(" ".join(str(error).split())[:200] or type(error).__name__) from error
            if answer.status_code not in PASSING:
                raise ModelError(self._refused(answer.status_code)) from error
            asked = answer.headers.get("Retry-After", "").strip()
            wait_s = float(asked) if asked.isdigit() else 0.0
            raise _Again(f"it answers {answer.status_code}", wait_s) from error


class HubSource(RangeSource):
    """A commit of a repository of the hub, read with the token, if this host has one.

    Attributes:
        located: where files are read, until that is refused.
    """

    def __init__(
        self, repo: str, commit: str = "", wait: Callable[[float], object] | None = None
    ) -> None:
        from huggingface_hub import constants

        self.repo, self.commit, self.endpoint = repo, commit, constants.ENDPOINT
        self.located: dict[str, str] = {}
        super().__init__(f"{self.endpoint} ({repo})", {}, wait=wait)

    def revision(self, *, max_tries: int = MAX_TRIES) -> Repository:
        """The repository's main branch, with all files of its top folder, which is read from then
        on. Raises ModelError; Unavailable if the hub cannot be reached."""
        from huggingface_hub import HfApi

        ask = HfApi(endpoint=self.endpoint).model_info
        how: Any = {"revision": "main", "files_metadata": True, "timeout": CONNECT_S}
        info = self._tried(lambda: ask(self.repo, **how), "its files", max_tries)
        if not COMMIT.fullmatch(info.sha or ""):  # it becomes the name of a folder
            raise ModelError(f"{self.endpoint} names no commit of {self.repo}; take another mirror")
        files = {
            each.rfilename: StoredFile(each.size, each.lfs and each.lfs["sha256"])
            for each in info.siblings or ()
            if "/" not in each.rfilename and each.size is not None
        }
        self.commit = info.sha
        return Repository(self.repo, info.sha, None, files)

    def locate(self, file: str) -> tuple[str, Mapping[str, str]]:
        """See RangeSource: at the hub, or at a signed URL, which gets no token."""
        from huggingface_hub import get_hf_file_metadata
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        if (url := self.located.get(file)) is None:
            # Files are of the top folder, so a "/" is part of the name and leads nowhere.
            at_hub = f"{self.endpoint}/{self.repo}/resolve/{self.commit}/{quote(file, safe='')}"
            url = self.located[file] = get_hf_file_metadata(at_hub, timeout=CONNECT_S).location
        own = urlsplit(url).netloc == urlsplit(self.endpoint).netloc
        return url, build_hf_headers() if own else {}

    def forget(self, file: str) -> None:
        """See RangeSource: it is located anew."""
        self.located.pop(file, None)

    def signed_url(self, file: str) -> str | None:
        """Where a file is read without a token; None: nowhere. Raises ModelError."""
        url, headers = self._tried(lambda: self.locate(file), file)
        return None if TOKEN in headers else url

    def _refused(self, status: int) -> str:
        if status == 404:
            return f"{self.name} has no such model, or not that file of it; check the name"
        if status in (401, 403):
            return (
                f"{self.endpoint} refuses {self.repo} ({status}): it is private or gated, or does "
                "not exist; accept its terms there, and set HF_TOKEN to a token of yours"
            )
        return f"{self.endpoint} refuses {self.repo} ({status}); check the name and your access"
