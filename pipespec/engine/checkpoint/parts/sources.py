"""Where parts of files come from: the Hugging Face Hub, a mirror of it, or another host; and how
blocks are fetched from several of these at once.

All are URLs that answer range requests. What may pass (a cut connection, a slow answer, 429, 5xx, a
body of the wrong length) is tried again; what remains is one sentence. Ids, tokens, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE and the HTTP client are those of huggingface_hub.
"""

from __future__ import annotations

import random
import re
import shutil
import ssl
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

from pipespec.engine.checkpoint.parts.folder import Repository, StoredFile
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, Range
from pipespec.errors import ModelError
from pipespec.system.validation import reason

# Seconds to wait for a connection to the hub, to a host, and for the next bytes of an answer.
CONNECT_S, HOST_CONNECT_S, READ_S = 10.0, 5.0, 30.0
# Tries, also of a host, and the seconds between them, which double.
MAX_TRIES, HOST_TRIES = 6, 2
FIRST_WAIT_S = 0.5
LONGEST_ASKED_S = 300.0  # that a server may ask to wait (RateLimit, Retry-After)
PASSING = (408, 425, 429, 500, 502, 503, 504)
TOKEN = "authorization"  # the header that holds it
COMMIT = re.compile("[0-9a-f]{40}")
NUM_CONNECTIONS = 8
SPARE_BYTES, GIB = 256 * 2**20, 2**30  # left free on the disk
Wanted = Collection[tuple[PartsFile, int]]  # blocks of files


class Unavailable(ModelError):
    """A source cannot be read, now or from here."""


class RangeSource:
    """Files at these URLs; `context`: another host, which proves by it who it is. Several threads
    may read at once. Others may set `stopped`, to end all reading soon. `wait` is called with the
    seconds between two tries. Raises ModelError, Unavailable."""

    def __init__(
        self, name: str, urls: Mapping[str, str], context: ssl.SSLContext | None = None
    ) -> None:
        from huggingface_hub import utils

        self.name, self._called, self._urls = name, name, urls
        self.stopped = threading.Event()
        self.wait: Callable[[float], object] = self.stopped.wait
        self._session: Any = utils.get_session()  # type: ignore[attr-defined]
        self._max_tries, self._connect_s = MAX_TRIES, CONNECT_S
        self._remedy = "check the network, or try again later"
        if context is not None:
            self._session = type(self._session)(verify=context, trust_env=False)
            self._max_tries, self._connect_s = HOST_TRIES, HOST_CONNECT_S
            self._called = f"{name} at {urlsplit(next(iter(urls.values()))).hostname}"
            self._remedy = "correct its address or interface, and let firewalls admit TCP to it"

    def url(self, file: str) -> str:
        """Where a file is read."""
        return self._urls[file]

    def read(self, file: str, part: Range, size: int) -> bytes | bytearray:
        """A part of a file of `size` bytes."""
        data: bytearray = self.tried(lambda: self._request(file, part, size), file, self._max_tries)
        return data

    def _request(self, file: str, part: Range, size: int) -> bytearray:
        from huggingface_hub import constants, utils

        (start, stop), url = part, self.url(file)
        # The token goes to the hub alone, by the scheme and name that the hub has; the session
        # leaves it out where it is redirected to another one.
        at_hub = urlsplit(url)[:2] == urlsplit(constants.ENDPOINT)[:2]
        headers = utils.build_hf_headers() if at_hub else {}  # type: ignore[attr-defined]
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        timeout = (self._connect_s, READ_S, READ_S, None)  # ..., write, for a free connection
        with self._session.stream("GET", url, headers=headers, timeout=timeout) as answer:
            utils.hf_raise_for_status(answer)  # type: ignore[attr-defined]
            if (whole := answer.status_code == 200) and part != (0, size):
                raise ConnectionError("it does not send parts of files (range requests)")
            stated, found = f"bytes {start}-{stop - 1}/{size}", answer.headers.get("Content-Range")
            if not whole and found != stated:
                raise ConnectionError(f"it sends the range {found!r} for {stated!r}")
            data = bytearray()
            for chunk in answer.iter_raw():
                data += chunk
                if len(data) > stop - start:
                    raise ConnectionError("it sends more bytes than were asked for")
            if len(data) < stop - start:
                raise ConnectionError("it ended the answer early")
        return data

    def tried(self, ask: Callable[[], Any], what: str, max_tries: int = MAX_TRIES) -> Any:
        """Ask until there is an answer, or there were too many tries."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        http_error: Any = HfHubHTTPError.__bases__[0]  # of httpx or httpx2, by the version
        tries = 0
        while True:
            tries += 1
            try:
                return ask()
            except OfflineModeIsEnabled as error:
                raise Unavailable("HF_HUB_OFFLINE is set") from error
            except HFValidationError as error:
                raise ModelError(f"{self.name!r} is no name of a model on the hub") from error
            except (ConnectionError, http_error) as error:
                why, wait_s = self._passing(error)
                if self.stopped.is_set():
                    raise Unavailable(f"reading from {self._called} was stopped") from error
                if tries >= max_tries or wait_s > LONGEST_ASKED_S:
                    raise Unavailable(
                        f"{self._called} did not send {what}, though asked {tries} times: {why}; "
                        f"{self._remedy}"
                    ) from error
            backoff = FIRST_WAIT_S * 2 ** (tries - 1) * random.uniform(0.75, 1.25)
            self.wait(max(backoff, wait_s))

    def _passing(self, error: Any) -> tuple[str, float]:
        """Why a request failed, and for how many seconds the server asks to wait. Raises ModelError
        if it is of no use to ask again."""
        from huggingface_hub import utils

        if (answer := getattr(error, "response", None)) is None:
            return reason(error, named=False), 0.0
        if answer.status_code not in PASSING:
            raise self._refused(answer.status_code) from error
        asked = answer.headers.get("Retry-After", "")
        limit = utils.parse_ratelimit_headers(answer.headers)  # type: ignore[attr-defined]
        if limit is not None and limit.remaining == 0:
            asked = str(limit.reset_in_seconds)
        return f"it answers {answer.status_code}", float(asked) if asked.isdigit() else 0.0

    def _refused(self, status: int) -> ModelError:
        return Unavailable(f"{self._called} answers {status}")


class HubSource(RangeSource):
    """A commit of a repository of the hub, read with the token, if this host has one."""

    def __init__(self, repo: str, commit: str = "") -> None:
        from huggingface_hub import constants

        self.repo, self.commit, self.endpoint = repo, commit, constants.ENDPOINT
        super().__init__(f"{self.endpoint} ({repo})", {})

    def revision(self, *, max_tries: int = MAX_TRIES) -> Repository:
        """The repository's main branch, with all files of its top folder; it is read from then on.
        Raises ModelError; Unavailable if the hub cannot be reached."""
        from huggingface_hub import HfApi

        ask = HfApi(endpoint=self.endpoint).model_info
        how: Any = {"revision": "main", "files_metadata": True, "timeout": CONNECT_S}
        info = self.tried(lambda: ask(self.repo, **how), "its files", max_tries)
        if not COMMIT.fullmatch(info.sha or ""):  # it becomes the name of a folder
            raise ModelError(f"{self.endpoint} names no commit of {self.repo}; take another mirror")
        files = {
            each.rfilename: StoredFile(each.size, each.lfs and each.lfs["sha256"])
            for each in info.siblings or ()
            if "/" not in each.rfilename and each.size is not None
        }
        self.commit = info.sha
        return Repository(self.repo, info.sha, None, files)

    def url(self, file: str) -> str:
        """At the hub, which redirects to a signed URL."""
        # Files are of the top folder, so a "/" is part of the name and leads nowhere.
        return f"{self.endpoint}/{self.repo}/resolve/{self.commit}/{quote(file, safe='')}"

    def signed_urls(self, files: Iterable[str]) -> dict[str, str]:
        """Where files are read without the token, for some time. Raises ModelError."""
        from huggingface_hub import get_hf_file_metadata

        found = {}
        for name in files:
            ask = partial(get_hf_file_metadata, self.url(name), timeout=CONNECT_S)
            found[name] = str(self.tried(ask, name).location)
        return found

    def _refused(self, status: int) -> ModelError:
        why = f"{self.endpoint} refuses {self.repo} ({status}); check the name and your access"
        if status == 404:
            why = f"{self.name} has no such model, or not that file of it; check the name"
        elif status in (401, 403):
            why = (
                f"{self.endpoint} refuses {self.repo} ({status}): it is private or gated, or does "
                "not exist; accept its terms there, and set HF_TOKEN to a token of yours"
            )
        return ModelError(why)


def fetch(
    asked: Mapping[RangeSource, Wanted], moved: Callable[[int], object] = lambda count: None
) -> dict[RangeSource, Unavailable]:
    """Fetch blocks of the files of a folder, whose lock the caller holds, from several sources at
    once; why some were given up. `moved` is called with numbers of bytes, from several threads.
    Memory: a block per connection. Raises ModelError: the disk is too small, or a source refuses;
    OSError if it cannot be written."""
    blocks = [block for wanted in asked.values() for block in wanted]
    files = {file for file, _ in blocks}
    total = sum(stop - start for start, stop in (file.place(number) for file, number in blocks))
    for folder in {file.path.parent for file in files}:
        free = shutil.disk_usage(folder).free
        if total + SPARE_BYTES > free:
            raise ModelError(
                f"{folder} needs {total / GIB:.2f} GiB for weights, but {free / GIB:.2f} GiB are "
                "free there; make room (`pipespec cache prune`), or set XDG_CACHE_HOME to another "
                "disk"
            )
    failed: dict[RangeSource, Unavailable] = {}

    def get(source: RangeSource, file: PartsFile, number: int) -> None:
        if source in failed or source.stopped.is_set():
            return
        try:
            data = source.read(file.path.name, file.place(number), file.size)
        except Unavailable as error:
            failed.setdefault(source, error)
            return
        file.write(number, data)
        moved(len(data))

    with ExitStack() as stack:
        # Each with connections of its own: none waits for another source.
        each_has = max(1, NUM_CONNECTIONS // max(1, len(asked)))
        pools = {of: stack.enter_context(ThreadPoolExecutor(each_has)) for of in asked}
        tasks = [pools[of].submit(get, of, *block) for of in asked for block in asked[of]]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            for source in asked:
                source.stopped.set()
            raise
        finally:
            for file in files:
                file.sync()
    return failed


def fetch_all(source: RangeSource, wanted: Wanted) -> None:
    """Fetch blocks from the one source that there is. Raises ModelError, OSError."""
    for error in fetch({source: wanted}).values():
        raise error
