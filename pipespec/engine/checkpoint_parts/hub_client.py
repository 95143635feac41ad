"""Reads from the Hugging Face Hub, or a mirror of it: what a repository holds, and parts of files.

A part is read by a range request. What may pass (a cut connection, a slow answer, 429, 5xx, a body
of the wrong length) is tried again, from the byte that was reached; what remains is one sentence.
Ids, tokens, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the HTTP session are those of
huggingface_hub.
"""

from __future__ import annotations

import email.utils
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from pipespec.engine.checkpoint_parts.parts_file import Range
from pipespec.errors import ModelError

# Seconds to wait for a connection, and for the next bytes of an answer.
CONNECT_S, READ_S = 10.0, 30.0
# Tries without a byte of progress, and the seconds between them, which double.
MAX_TRIES = 6
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
# A server may ask for a longer wait (Retry-After), up to this many seconds.
LONGEST_ASKED_S = 300.0
# Of one small file, such as a tokenizer.
MOST_FILE_BYTES = 64 * 2**20
PASSING = (408, 425, 429, 500, 502, 503, 504)
TOKEN = "authorization"  # the header that holds it
_COMMIT = re.compile("[0-9a-f]{40}")
T = TypeVar("T")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: bytes, and the SHA-256 that the hub states for large files."""

    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Revision:
    """A commit of a repository, and the files of its top folder."""

    repo: str
    commit: str
    files: Mapping[str, HubFile]


class Unavailable(ModelError):
    """The hub cannot be reached."""


class _Again(Exception):
    """A request failed in a way that may pass; `wait_s` is what the server asks for."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class HubClient:
    """Reads one repository. Several threads may use it at once."""

    def __init__(
        self,
        repo: str,
        *,
        wait: Callable[[float], object] | None = None,
        locate: Callable[..., str | None] | None = None,
    ) -> None:
        """
        Args:
            wait: called with the seconds between two tries; None: wait so long.
            locate: the signed URL of a `file`, or a `fresh` one, or None; None: this host has the
                token.
        """
        from huggingface_hub import constants

        self.repo, self.endpoint = repo, constants.ENDPOINT
        self.stopped = threading.Event()  # set by others, to end all reading soon
        self._wait = self.stopped.wait if wait is None else wait
        self._ask = locate
        self._located: dict[tuple[str, str], str] = {}
        self._locating = threading.Lock()

    def revision(self, name: str = "main", *, max_tries: int = MAX_TRIES) -> Revision:
        """What a branch or commit of the repository holds. Raises ModelError; Unavailable if the
        hub cannot be reached."""
        from huggingface_hub import HfApi

        def ask() -> Any:
            api = HfApi(endpoint=self.endpoint)
            return api.model_info(self.repo, revision=name, files_metadata=True, timeout=CONNECT_S)

        info = self._tried(ask, "its files", max_tries)
        if not _COMMIT.fullmatch(info.sha or ""):  # it becomes the name of a folder
            raise ModelError(f"{self.endpoint} names no commit of {self.repo}; take another mirror")
        files = {
            each.rfilename: HubFile(each.size, None if each.lfs is None else each.lfs["sha256"])
            for each in info.siblings or ()
            if "/" not in each.rfilename and each.size is not None
        }
        return Revision(self.repo, info.sha, files)

    def read_file(self, commit: str, name: str, size: int) -> bytes:
        """A small file. Raises ModelError."""
        if size > MOST_FILE_BYTES:
            raise ModelError(
                f"{name} of {self.repo} has {size} bytes, where at most {MOST_FILE_BYTES} are "
                "expected; take another checkpoint"
            )
        return b"".join(self.read(commit, name, (0, size), size))

    def read(self, commit: str, name: str, part: Range, size: int) -> Iterator[bytes]:
        """The bytes of a part of a file of `size` bytes, as they come. Raises ModelError."""
        at, stop = part
        tries = 0
        while at < stop:
            try:
                with self._translated():
                    for chunk in self._range(commit, name, (at, stop), size, fresh=tries > 0):
                        at, tries = at + len(chunk), 0
                        yield chunk
                    if at < stop:
                        raise _Again("it ended the answer early")
            except _Again as error:
                tries += 1
                self._pause(error, tries, name, MAX_TRIES)

    def signed_url(self, commit: str, name: str, *, fresh: bool = False) -> str | None:
        """Where a file is read without a token; None: nowhere. `fresh`: one that was named before
        is refused. Raises ModelError."""
        url = self._tried(lambda: self._locate(commit, name, fresh=fresh), name, MAX_TRIES)
        return None if TOKEN in self._headers(url) else url

    def _locate(self, commit: str, name: str, *, fresh: bool) -> str:
        """Where a file is read: at the hub, or at a signed URL, which is used until it expires."""
        from huggingface_hub import get_hf_file_metadata

        with self._locating:
            if fresh or (commit, name) not in self._located:
                url: str | None
                if self._ask is None:
                    # Files are of the top folder, so a "/" is part of the name and leads nowhere.
                    file = quote(name, safe="")
                    at_hub = f"{self.endpoint}/{self.repo}/resolve/{commit}/{file}"
                    url = get_hf_file_metadata(at_hub, timeout=CONNECT_S).location
                else:
                    url = self._ask(file=name, fresh=fresh)
                if url is None:
                    raise Unavailable("the hub sends this file to holders of the token alone")
                self._located[commit, name] = url
            return self._located[commit, name]

    def _headers(self, url: str) -> dict[str, str]:
        """With the token, if there is one, which must not leave the hub."""
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        own = self._ask is None and urlsplit(url).netloc == urlsplit(self.endpoint).netloc
        return {**(build_hf_headers() if own else {}), "Accept-Encoding": "identity"}

    def _range(
        self, commit: str, name: str, part: Range, size: int, *, fresh: bool
    ) -> Iterator[bytes]:
        from huggingface_hub import utils

        start, stop = part
        url = self._locate(commit, name, fresh=fresh)
        headers = {**self._headers(url), "Range": f"bytes={start}-{stop - 1}"}
        timeout = (CONNECT_S, READ_S, READ_S, None)  # connect, read, write, a free connection
        with utils.get_session().stream(  # type: ignore[attr-defined]
            "GET", url, headers=headers, timeout=timeout, follow_redirects=False
        ) as answer:
            if TOKEN not in headers and answer.status_code in (401, 403):
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
                start += len(chunk)
                if start > stop:
                    raise _Again("it sends more bytes than were asked for")
                yield chunk

    def _tried(self, ask: Callable[[], T], what: str, max_tries: int) -> T:
        """Ask until there is an answer. Raises ModelError, Unavailable."""
        tries = 0
        while True:
            try:
                with self._translated():
                    return ask()
            except _Again as error:
                tries += 1
                self._pause(error, tries, what, max_tries)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise ModelError, Unavailable or _Again in place of huggingface_hub's errors."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        # The HTTP library is httpx or httpx2, by the version of huggingface_hub.
        http_error = next(
            each
            for each in HfHubHTTPError.__mro__
            if each.__name__ == "HTTPError" and issubclass(each, Exception)
        )
        try:
            yield
        except OfflineModeIsEnabled as error:
            raise Unavailable("HF_HUB_OFFLINE is set") from error
        except HFValidationError as error:
            raise ModelError(f"{self.repo!r} is no name of a model on the hub") from error
        except http_error as error:
            answer = getattr(error, "response", None)
            if answer is None:
                why = " ".join(str(error).split())[:200] or type(error).__name__
                raise _Again(why) from error
            if answer.status_code not in PASSING:
                raise ModelError(_refusal(self.repo, self.endpoint, answer.status_code)) from error
            raise _Again(
                f"it answers {answer.status_code}", _asked_wait_s(answer.headers)
            ) from error

    def _pause(self, error: _Again, tries: int, what: str, max_tries: int) -> None:
        """Wait before the next try. Raises Unavailable after too many."""
        if self.stopped.is_set():
            raise Unavailable(f"reading {self.repo} was stopped") from error
        if tries >= max_tries or error.wait_s > LONGEST_ASKED_S:
            raise Unavailable(
                f"{self.endpoint} did not send {what} of {self.repo}, though asked {tries} times: "
                f"{error}; check the network, or try again later"
            ) from error
        backoff = min(FIRST_WAIT_S * 2 ** (tries - 1), LONGEST_WAIT_S) * random.uniform(0.75, 1.25)
        self._wait(max(backoff, error.wait_s))


def _asked_wait_s(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait (Retry-After, in seconds or as a date)."""
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, date.timestamp() - time.time())


def _refusal(repo: str, endpoint: str, status: int) -> str:
    if status in (401, 403):
        return (
            f"{endpoint} refuses {repo} ({status}): it is private or gated, or does not exist; "
            "accept its terms there, and set HF_TOKEN to a token of yours"
        )
    if status == 404:
        return f"{endpoint} has no model {repo}, or not that file of it; check the name"
    return f"{endpoint} refuses {repo} ({status}); check the name and your access"
