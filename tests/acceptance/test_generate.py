"""`pipespec generate` as a user runs it: real processes, and nothing left when it is over."""

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.cluster import session
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.redis_connection import RedisConnection
from pipespec.system.folders import resource_dir
from pipespec.system.network_interfaces import LOOPBACK
from tests.helpers.listening import assert_private, family, watched
from tests.helpers.sandbox import PATIENCE_S, Sandbox
from tools.rig import cluster

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time there was a king who"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Sandbox]:
    with Sandbox(tmp_path) as place:
        (tmp_path / "pipespec").mkdir()
        yield place
        assert place.files() == []
        assert place.processes() == []


def expected(max_new_tokens: int) -> tuple[list[int], list[int], str]:
    folder = resource_dir("demo") / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.encode(PROMPT)
    (tokens,) = cluster.reference(folder, [prompt], max_new_tokens)
    return prompt, tokens, tokenizer.decode(tokens, skip_special_tokens=True)


def test_generate_json_is_one_object_with_all_results(place, tmp_path):
    prompt, tokens, text = expected(40)
    trace = tmp_path / "trace.json"
    settings = ("cluster.stages=3", "decode.max_new_tokens=40", f"trace={trace}")
    run = place.start("generate", "--prompt", PROMPT, "--json", *settings)
    with watched(lambda: family(run.pid)) as seen:
        out, err = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, err) == (0, "")
    answer = json.loads(out)
    assert answer["token_ids"] == tokens
    assert answer["text"] == text
    assert answer["prompt_tokens"] == len(prompt)
    assert answer["completion_tokens"] == len(tokens)
    assert answer["finish_reason"] in ("stop", "length")
    stats = answer["stats"]
    assert set(stats["tbt_ms"]) == {"mean", "p50", "p99"}
    assert len(stats["stage_busy"]) == 3
    assert all(0 < busy < 1 for busy in stats["stage_busy"])
    for name in (
        "ttft_ms", "tokens_per_s", "steps", "tokens_per_step", "hit_rate", "rows_per_step",
        "pruned_rows", "draft_rounds_per_step", "control_ms_per_step", "features_ms_per_step",
    ):  # fmt: skip
        assert stats[name] >= 0, name

    events = json.loads(trace.read_text())["traceEvents"]
    spans = {(event["tid"], event["name"]) for event in events if event["ph"] == "X"}
    assert {tid for tid, _ in spans} == {0, 1, 2, 3}
    assert {
        (0, "draft"),
        (0, "wait"),
        (1, "compute"),
        (1, "prune"),
        (2, "send"),
        (3, "verify"),
    } <= spans
    assert all((rank, "control") in spans for rank in range(4))

    # A socket of gloo's for each end of three links, at the loopback, and nothing else.
    assert_private(seen, {LOOPBACK})
    assert len({each.port for each in seen if each.kind == "tcp"}) == 2 * 3


def test_generate_streams_up_to_a_stop_string_and_leaves_the_users_redis_unchanged(place, tmp_path):
    """In a working folder with files that are named like modules of Python and of packages."""
    for name in ("json", "numpy", "queue", "select", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('of the working folder')")
    _, _, text = expected(40)
    stop = text[12:15]
    settings = ("cluster.stages=2", "decode.max_new_tokens=40", f"decode.stop=['{stop}']")
    with EmbeddedRedis() as server:
        code, out, err = place.run(
            "generate",
            "--prompt",
            PROMPT,
            *settings,
            "policy=level",
            f"controller.url={server.url}",
            cwd=tmp_path,
        )
        assert code == 0, err
        assert out.rstrip("\n") == text[: text.index(stop)].rstrip("\n")
        assert "ended by stop" in err
        with closing(RedisConnection(server.url)) as pipe:
            assert pipe.call("DBSIZE") == 0


@pytest.mark.parametrize(
    "sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_interrupted_generate_leaves_no_process_or_key(place, sent):
    settings = ("cluster.stages=3", "decode.max_new_tokens=1500", "decode.ignore_eos=true")
    run = place.start("generate", "--prompt", PROMPT, *settings)
    assert run.stdout.read(1), "it ended without a word"  # every rank is at work
    run.send_signal(sent)
    _, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 128 + sent
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("setting", "prompt", "said"),
    [
        ("cluster.stages=17", PROMPT, "only 16 layers"),
        ("model.context=8", PROMPT, "the context holds 8"),
        ("controller.url=redis://127.0.0.1:1", PROMPT, "refused the connection"),
        ("cluster.devices=[cuda:999]", PROMPT, "CUDA devices"),
        ("cluster.stages=1", "king " * 4000, "the context holds 2048"),
    ],
)
def test_what_cannot_be_decoded_is_one_sentence_before_a_rank_starts(
    capsys, monkeypatch, setting, prompt, said
):
    def no_rank(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(session.WorkerGroup, "start_workers", no_rank)
    assert main(["generate", "--prompt", prompt, setting]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pipespec: ")
    assert err.count("\n") == 1
    assert said in err
