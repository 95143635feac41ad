"""Reads from the Hugging Face Hub, or a mirror of it: what a repository holds, and parts of files.

A part is read by a range request. What may pass (a cut connection, a slow answer, 429, 5xx, a body
of the wrong length) is tried again, from the byte that was reached; what remains is one sentence.
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are those of huggingface_hub, whose HTTP session is used.
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
from urllib.parse import quote, urljoin, urlsplit

from pipespec.engine.checkpoint_parts.ranges import Range
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
MAX_REDIRECTS = 5
PASSING = (408, 425, 429, 500, 502, 503, 504)
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


@dataclass(frozen=True)
class Location:
    """Where a file is read: the hub itself, or a signed URL that needs no token."""

    url: str
    headers: Mapping[str, str]

    @property
    def has_token(self) -> bool:
        """Whether it is for the holder of a token alone."""
        return any(name.lower() == "authorization" for name in self.headers)


class Unavailable(ModelError):
    """The hub cannot be reached."""


class _Again(Exception):
    """A request failed in a way that may pass; `wait_s` is what the server asks for."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class HubClient:
    """Reads one repository. Several threads may use it at once."""

    def __init__(self, repo: str, *, wait: Callable[[float], object] | None = None) -> None:
        """`wait` is called with the seconds between two tries; None: wait so long."""
        from huggingface_hub import constants
        from huggingface_hub.errors import HfHubHTTPError

        self.repo = repo
        self.endpoint = constants.ENDPOINT
        self.stopped = threading.Event()  # set by others, to end all reading soon
        self._wait = self.stopped.wait if wait is None else wait
        self._locations: dict[tuple[str, str], Location] = {}
        self._lock = threading.Lock()
        # The HTTP library is httpx or httpx2, by the version of huggingface_hub.
        kinds = HfHubHTTPError.__mro__
        self._http_error: type[Exception] = next(
            each for each in kinds if each.__name__ == "HTTPError" and issubclass(each, Exception)
        )

    def revision(self, name: str = "main", *, max_tries: int = MAX_TRIES) -> Revision:
        """What a branch or commit of the repository holds. Raises ModelError; Unavailable if the
        hub cannot be reached."""
        from huggingface_hub import HfApi

        def ask() -> Any:
            api = HfApi(endpoint=self.endpoint)
            return api.model_info(self.repo, revision=name, files_metadata=True, timeout=CONNECT_S)

        info = self._tried(ask, max_tries)
        if not _COMMIT.fullmatch(info.sha or ""):  # it becomes the name of a folder
            raise ModelError(f"{self.endpoint} names no commit of {self.repo}; take another mirror")
        files = {}
        for each in info.siblings or ():
            if "/" not in each.rfilename and each.size is not None:
                sha256 = None if each.lfs is None else each.lfs["sha256"]
                files[each.rfilename] = HubFile(each.size, sha256)
        return Revision(self.repo, info.sha, files)

    def read_file(self, commit: str, name: str, size: int) -> bytes:
        """A small file. Raises ModelError."""
        if size > MOST_FILE_BYTES:
            raise ModelError(
                f"{name} of {self.repo} has {size} bytes, where at most {MOST_FILE_BYTES} are "
                "expected; take another checkpoint"
            )
        if size == 0:
            return b""
        return b"".join(self.read(commit, name, (0, size), size))

    def read(self, commit: str, name: str, part: Range, size: int) -> Iterator[bytes]:
        """The bytes of a part of a file of `size` bytes, as they come. Raises ModelError."""
        at, stop = part
        tries = 0
        while at < stop:
            try:
                location = self.locate(commit, name)
                with self._range(location, (at, stop), size) as chunks:
                    for chunk in chunks:
                        if len(chunk) > stop - at:
                            raise _Again("it sends more bytes than were asked for")
                        at += len(chunk)
                        tries = 0
                        yield chunk
                if at < stop:
                    raise _Again("it ended the answer early")
            except _Again as error:
                tries += 1
                self.forget_location(commit, name)
                self._pause(error, tries, name)

    def location(self, commit: str, name: str, *, fresh: bool = False) -> Location:
        """Where a file is read; `fresh`: a location that was named before is refused. Raises
        ModelError."""
        tries = 0
        if fresh:
            self.forget_location(commit, name)
        while True:
            try:
                return self.locate(commit, name)
            except _Again as error:
                tries += 1
                self._pause(error, tries, name)

    def locate(self, commit: str, name: str) -> Location:
        """Where a file is read now; a signed URL is used until it is refused. Raises _Again."""
        key = commit, name
        with self._lock:
            found = self._locations.get(key)
        if found is None:
            # Files are of the top folder, so a "/" is part of the name and leads nowhere.
            file = quote(name, safe="")
            found = self._resolve(f"{self.endpoint}/{self.repo}/resolve/{commit}/{file}")
            with self._lock:
                self._locations[key] = found
        return found

    def forget_location(self, commit: str, name: str) -> None:
        """Resolve the file anew next time: a signed URL expires."""
        with self._lock:
            self._locations.pop((commit, name), None)

    def _resolve(self, url: str) -> Location:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        hub = urlsplit(url).netloc
        for _ in range(MAX_REDIRECTS):
            with self._answer("HEAD", url, headers) as answer:
                if not 300 <= answer.status_code < 400:
                    self._check(answer)
                    return Location(url, headers)
                url = urljoin(url, answer.headers.get("Location", ""))
            if urlsplit(url).netloc != hub:  # the token must not leave the hub
                return Location(url, {"Accept-Encoding": "identity"})
        raise _Again(f"it redirects more than {MAX_REDIRECTS} times")

    @contextmanager
    def _range(self, location: Location, part: Range, size: int) -> Iterator[Iterator[bytes]]:
        start, stop = part
        headers = {**location.headers, "Range": f"bytes={start}-{stop - 1}"}
        with self._answer("GET", location.url, headers) as answer:
            if answer.status_code in (401, 403) and not location.has_token:
                raise _Again(f"its signed URL is refused ({answer.status_code})")
            self._check(answer)
            whole = answer.status_code == 200
            if whole and part != (0, size):
                raise _Again("it does not send parts of files (range requests)")
            stated = f"bytes {start}-{stop - 1}/{size}"
            if not whole and answer.headers.get("Content-Range", "").strip() != stated:
                found = answer.headers.get("Content-Range")
                raise _Again(f"it sends the range {found!r} for {stated!r}")
            length = answer.headers.get("Content-Length", "").strip()
            if length and length != str(stop - start):
                raise _Again(f"it sends {length} bytes where {stop - start} were asked for")
            yield self._chunks(answer)

    def _chunks(self, answer: Any) -> Iterator[bytes]:
        try:
            yield from answer.iter_raw()
        except self._http_error as error:
            raise _Again(_reason(error)) from error

    @contextmanager
    def _answer(self, method: str, url: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """An answer whose body is not read yet. Raises _Again, or Unavailable when offline."""
        from huggingface_hub.errors import OfflineModeIsEnabled
        from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

        timeout = (CONNECT_S, READ_S, READ_S, None)  # connect, read, write, a free connection
        session = get_session()
        try:
            request = session.build_request(method, url, headers=dict(headers), timeout=timeout)
            answer = session.send(request, stream=True, follow_redirects=False)
        except OfflineModeIsEnabled as error:
            raise Unavailable("HF_HUB_OFFLINE is set") from error
        except self._http_error as error:
            raise _Again(_reason(error)) from error
        try:
            yield answer
        finally:
            answer.close()

    def _check(self, answer: Any) -> None:
        """Raise _Again or ModelError unless a request succeeded."""
        status = answer.status_code
        if status in PASSING:
            raise _Again(f"it answers {status}", _asked_wait_s(answer.headers))
        if status >= 400:
            raise ModelError(_refusal(self.repo, self.endpoint, status))

    def _tried(self, ask: Callable[[], T], max_tries: int) -> T:
        """Ask the hub's API until it answers. Raises ModelError, Unavailable."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        tries = 0
        while True:
            try:
                return ask()
            except OfflineModeIsEnabled as error:
                raise Unavailable("HF_HUB_OFFLINE is set") from error
            except HFValidationError as error:
                raise ModelError(f"{self.repo!r} is no name of a model on the hub") from error
            except (HfHubHTTPError, self._http_error) as error:
                answer = getattr(error, "response", None)
                status = getattr(answer, "status_code", None)
                if status is not None and status not in PASSING:
                    raise ModelError(_refusal(self.repo, self.endpoint, status)) from error
                headers = {} if answer is None else answer.headers
                why = _reason(error) if status is None else f"it answers {status}"
                tries += 1
                self._pause(
                    _Again(why, _asked_wait_s(headers)), tries, "its files", max_tries=max_tries
                )

    def _pause(self, error: _Again, tries: int, what: str, *, max_tries: int = MAX_TRIES) -> None:
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


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return text or type(error).__name__


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
