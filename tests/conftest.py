"""What every test shares: one thread each, no network, one sequence of random examples."""

import argparse
import atexit
import faulthandler
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# `nohup make test &` hands on an ignored SIGINT; what the tests start must hear Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What is imported and collected here stays until the end: more than half a million objects, which
# every full collection of garbage would visit.
gc.disable()

# Before torch, tokenizers and huggingface_hub are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# What is kept of models is kept for one run of the suite, and its workers share it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="pipespec-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from tests.helpers.real_models import lacking
from tests.helpers.results import write_results

# Random examples are the same in every run; `--hypothesis-profile=explore` looks for new ones.
fixed = settings(deadline=None, derandomize=True, database=None)
settings.register_profile("fixed", fixed, max_examples=20)
settings.register_profile("long", fixed, max_examples=200)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")

torch.set_num_threads(1)

# Folders whose tests share a cluster.
SHARING = ("tests/integration/pages/", "tests/integration/serving/")
GRACE_S = 60.0  # for what a test does after its time limit
STDERR = pytest.StashKey[int]()  # the real one, which pytest hides from tests
STARTED_S = time.time()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="run the tests marked `long` too, and every case"
    )
    parser.addoption(
        "--write-results", type=Path, metavar="FILE", help="write the result of the run as JSON"
    )
    parser.addoption(
        "--part",
        type=_part,
        metavar="I/N",
        help="run every Nth file of tests alone, beginning with the Ith",
    )


def _part(text: str) -> tuple[int, int]:
    """The number of a part, from 1, and how many there are."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write I/N, as in 1/3")
    return int(number), int(count)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process, with a traceback of every thread, if a test hangs beyond its time limit.

    pytest-timeout interrupts a test once. What the test does on its way out, such as waiting for a
    thread, has no limit of its own.
    """
    mark = item.get_closest_marker("timeout")
    limit = float(mark.args[0] if mark else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + GRACE_S, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)
    if config.getoption("--long") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("long")


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether a test may take its time and try every case, not some of them."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture(scope="session")
def demo() -> ModelInfo:
    """The demo pair's target, with a short context."""
    return ModelInfo.of(decide(compose(["model.context=100"])))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        number, count = part
        files = list(dict.fromkeys(item.path for item in items))
        chosen = {*files[number - 1 :: count]}
        config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
        items[:] = [item for item in items if item.path in chosen]
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if (real := item.get_closest_marker("real_models")) and (why := lacking(real.args)):
            item.add_marker(pytest.mark.skip(reason=why))
        if "long" in item.keywords and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long: pass --long"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


class _Scheduling(LoadFileScheduling):
    """Runs the tests of a file in one process, and those of a folder that share a cluster."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((folder for folder in SHARING if file.startswith(folder)), file)


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.pluginmanager.hasplugin("dsession"):
        gc.enable()  # the first of xdist's processes collects no tests


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look at their end for what was never freed


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Print what tests have recorded, and write what `--write-results` asks for. Of xdist's
    processes only the first one writes: others would change the checkout before it states its
    commit."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid}: {name}: {value}")
    path = config.getoption("--write-results")
    if path is not None and not hasattr(config, "workerinput"):
        write_results(path, terminalreporter.stats, exitstatus, STARTED_S)
