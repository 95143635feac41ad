"""Whatever stands in arguments and files: every command ends with a sentence and an exit code.

Nothing here begins a cluster: what would reach one names a device that no machine has, or a model
folder that is not there. What files hold is tested in tests/unit/system/test_validation.py.
"""

import io
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipespec.cli.main import main
from pipespec.config import choices
from pipespec.system.exit_codes import exit_code_of

NO_DEVICE = "cluster.devices=[cuda:99]"
NO_MODEL = "model.target=/no/such/model"
DIGITS = "9" * 5000
NESTED = "[" * 3000


def examples(share: float) -> settings:
    """So many of the examples that other tests take."""
    count = max(1, int(settings.default.max_examples * share))
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])


# What has to read all of conf/ takes a tenth of a second.
slow, few, many = examples(0.1), examples(0.2), examples(0.5)

ODD = (
    *("", "-1", "0", "1", "3", "1e999", "nan", "null", "true", "~nobody/x", "\0", "..", "/", "é"),
    *("a" * 300, "x" * 5000, "\udcff", "\ud800", "a\nb", "[/red]", "${a}", "${oc.env:HOME}", "*"),
    *(DIGITS, NESTED, "[1,2]", "['a']", "{a: 1}", "a,b", "1:2", "choice(1,2)"),
)
TEXTS = st.one_of(
    st.sampled_from(ODD),
    st.text(alphabet="ab01.-+:=,/'\"[]{}()$&*!%~@#\\ \n\t\0é\ud800", max_size=8),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([10**18, 10**400, -(2**63), 1.5, float("nan"), float("inf"), 1e300]),
    TEXTS,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
BYTES = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([NESTED, DIGITS, "{", "", "\ufeff{}", f'{{"a": {DIGITS}}}', "a: &a [*a]"]).map(
        str.encode
    ),
)


@st.composite
def like(draw: st.DrawFn, whole: Any) -> bytes:
    """JSON of the shape of `whole`, with some of it replaced or left out, or what is none."""
    if draw(st.integers(0, 5)) == 0:
        return draw(BYTES)
    return json.dumps(draw(altered(whole))).encode("utf-8", "surrogatepass")


def altered(whole: Any) -> st.SearchStrategy[Any]:
    """A value of the shape of `whole`, with a part of it replaced."""
    if isinstance(whole, dict) and whole:
        key = st.sampled_from(sorted(whole))
        return st.one_of(
            st.just(whole),
            key.flatmap(lambda k: altered(whole[k]).map(lambda v: {**whole, k: v})),
            key.map(lambda k: {name: v for name, v in whole.items() if name != k}),
            st.builds(lambda k, v: {**whole, k: v}, TEXTS, VALUES),
        )
    if isinstance(whole, list) and whole:
        return st.one_of(
            st.just([]), altered(whole[0]).map(lambda v: [v, *whole[1:]]), VALUES, st.just(whole)
        )
    return VALUES


@contextmanager
def place() -> Iterator[Path]:
    """A folder with everything that a command may write outside its own arguments."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "HOME"):
            patch.setenv(name, folder)
        patch.chdir(folder)
        yield Path(folder)


def assert_ends_well(*argv: str, stdin: bytes = b"") -> None:
    """Run a command; it must not let anything out, nor end by what nobody foresaw."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code: object = exit_code_of(lambda: main(argv))
        except SystemExit as leaving:  # --help
            code = leaving.code
    said = err.getvalue()
    assert code in (0, 1, 2), said
    assert "Traceback" not in said + out.getvalue()
    assert code == 0 or "pipespec: " in said or out.getvalue()


WORDS = [
    *("--json", "--on", "--prompt", "--prompt-file", "--chat", "--name", "--profile", "--measured"),
    *("--dataset", "--num-prompts", "--concurrency", "--prompt-tokens", "--output", "--version"),
    *("--request-rate", "--policies", "-", "--help", "lab"),
]
COMMANDS = ["generate", "bench", "up", "plan", "cache", "status", "down", "invite"]
NAMES = [setting.name for setting in choices.settings()]


@few
@given(st.sampled_from(COMMANDS), st.lists(st.sampled_from(WORDS) | TEXTS, max_size=4), BYTES)
def test_any_arguments(command: str, words: list[str], stdin: bytes) -> None:
    with place():
        assert_ends_well(command, *words, NO_DEVICE, NO_MODEL, stdin=stdin)


@examples(0.3)
@given(st.lists(st.tuples(st.sampled_from(NAMES), TEXTS), min_size=1, max_size=2))
@example([("cluster.patience_s", "9" * 400)])
@example([("model.draft", "~nobody")])
def test_any_settings(pairs: list[tuple[str, str]]) -> None:
    with place():
        chosen = [f"{name}={value}" for name, value in pairs]
        assert_ends_well("generate", "--prompt", "a", *chosen, NO_DEVICE, NO_MODEL)


@slow
@given(st.lists(st.sampled_from(NAMES), max_size=2), VALUES, BYTES)
def test_any_standard_input(names: list[str], value: Any, raw: bytes) -> None:
    lines = [f"{name}={value}" for name in names]
    for text in (json.dumps([*lines, value]).encode(errors="surrogatepass"), raw):
        with place():
            assert_ends_well("up", "-", NO_DEVICE, NO_MODEL, stdin=text)


OPTIONS = ("stage_ms", "hop_ms", "draft_ms", "curve", "spread", "policy")
PROFILE = {"stages": 2, "stage_ms": [[1, "8:2"], ["1:3"]], "hop_ms": 1, "draft_ms": 0.5}


@many
@given(st.lists(st.tuples(st.sampled_from(OPTIONS), TEXTS), max_size=2), like(PROFILE))
def test_any_plan(options: list[tuple[str, str]], profile: bytes) -> None:
    with place() as folder:
        (folder / "profile").write_bytes(profile)
        argv = ["plan", "policy=level", "policy.width=4", "proposer.rounds=1", "stages=2"]
        argv += ["--tokens", "3", "--profile", "profile"]
        assert_ends_well(*argv, *(f"{name}={value}" for name, value in options))


HOST = {
    "name": "a",
    "address": "127.0.0.1",
    "ssh": "local",
    "user": "me",
    "port": 22,
    "identity": "~/key",
    "interface": "lo",
    "devices": ["cpu", "cpu"],
    "python": "python3",
    "env": {"A": "1"},
    "target": "/x",
    "draft": "/y",
    "memory_gib": 2,
}
HOSTS = {
    "name": "lab",
    "defaults": {"user": "me"},
    "hosts": [HOST],
    "draft": "a/0",
    "order": ["a"],
    "split": [1],
    "spares": 0,
}


@few
@given(like(HOSTS))
def test_any_hosts_file(text: bytes) -> None:
    with place() as folder:
        (folder / "hosts.yaml").write_bytes(text)
        assert_ends_well("up", "hosts.yaml", NO_MODEL)
