import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.common.reference_texts import TRUTH_MARGIN, record_reference
from pipespec import LLM, SamplingParams
from pipespec.cli.main import main
from pipespec.client import registry
from pipespec.client.answers import Result, ask
from pipespec.client.registry import RunningCluster
from pipespec.client.request_settings import RequestSettings
from pipespec.client.sync_client import attach
from pipespec.cluster import session
from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.memory import bytes_by_rank
from pipespec.config.compose import compose
from pipespec.config.hosts import own_name
from pipespec.controller.log_records import Finished
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.errors import RankFailed
from pipespec.extras.bench.dataset import load
from pipespec.system.folders import resource_dir
from pipespec.system.network_interfaces import LOOPBACK
from tests.helpers.imports import run_commands
from tests.helpers.listening import assert_private, listening, visit
from tests.helpers.sandbox import ENDING_S, PATIENCE_S, Sandbox
from tests.helpers.waiting import until
from tools.rig import cluster
from tools.rig.log import events_of

pytestmark = pytest.mark.slow
NAME = "lab"
NUM_TOKENS = 12
PROMPTS = (
    "Once upon a time there was a king who",
    "The little girl ran out of the house and",
    "Tom has three apples and buys four more. How many",
)
SETTINGS = (
    "cluster.stages=2",
    "cluster.devices=[cpu]",
    "scheduler.max_num_seqs=1",  # so that others wait
    "policy.row_cost=0.0001",  # speculates, however long that takes
    f"decode.max_new_tokens={NUM_TOKENS}",
)
BENCHMARKS = {"tales": [PROMPTS[0], "Once upon", PROMPTS[1]], "sums": [PROMPTS[2]]}
BENCH_TOKENS, CUT = 8, 9
BENCH = [f"decode.max_new_tokens={BENCH_TOKENS}", "decode.ignore_eos=true"]
LONG = ("decode.max_new_tokens=1500", "decode.ignore_eos=true")


def test_start_counts_the_bytes_that_are_loaded_until_all_are():
    deployment, told = decide(compose([*SETTINGS, "model.context=64"])), list[tuple[int, int]]()
    with (
        session.start_agents(deployment) as agents,
        session.start_cluster(deployment, agents, lambda *each: told.append(each)),
    ):
        done, of = zip(*told, strict=True)
        assert [*done] == sorted(done) and done[-1] == of[-1]
        assert {*of} == {sum(bytes_by_rank(deployment)) + deployment.num_ranks}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A place where a cluster is up, until a test kills it."""
    with Sandbox(tmp_path_factory.mktemp("up")) as place:
        code, out, err = place.run("up", "--detach", "--json", "--name", NAME, *SETTINGS)
        assert (code, err) == (0, "")
        told = json.loads(out)
        assert (told["name"], told["num_ranks"], told["context"]) == (NAME, 3, 2048)
        yield place


@pytest.fixture
def up(running: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The running cluster, for commands of this process too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(running.folder))
    return running


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """What the target says after each prompt, by Hugging Face."""
    folder = resource_dir("demo") / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    return dict(zip(PROMPTS, cluster.reference(folder, prompts, NUM_TOKENS), strict=True))


def ask_on(
    running: RunningCluster,
    settings: list[str],
    on_text: Callable[[str], None] = lambda _: None,
    prompt: str = PROMPTS[0],
) -> Result:
    """What a running cluster answers."""
    chosen = RequestSettings.on(running, settings)
    with attach(running) as client:
        return ask(client, chosen, running.served.encode(prompt), on_text)[0]


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["status", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["clusters"]


def test_requests_of_several_users_queue_and_each_gets_its_own_text(up, expected, capsys):
    (before,) = status(capsys)

    def ask(prompt: str) -> tuple[int, str, str]:
        return up.run("generate", "--on", NAME, "--json", "--prompt", prompt)

    # Two of them are processes of their own.
    running = registry.find(NAME)
    with ThreadPoolExecutor() as users:
        asked = users.map(ask, PROMPTS[:2])
        here = ask_on(running, [], prompt=PROMPTS[2])
        answers = list(asked)
    assert [(code, err) for code, _, err in answers] == [(0, "")] * 2
    told = [json.loads(out) for _, out, _ in answers]
    ids = [*(answer["token_ids"] for answer in told), here.token_ids]
    assert dict(zip(PROMPTS, ids, strict=True)) == expected
    for stats in (*(answer["stats"] for answer in told), here.stats):
        assert 0 < stats["ttft_ms"] < PATIENCE_S * 1e3
        assert len(stats["stage_busy"]) == 2
    (after,) = status(capsys, NAME)
    assert (after["state"], after["ranks"], after["num_ranks"]) == ("ready", 3, 3)
    assert (after["open"], after["queued"], after["faults"]) == (0, 0, 0)
    assert after["finished"] == before["finished"] + len(PROMPTS)
    assert after["epoch"] == before["epoch"]
    assert after["up_s"] > before["up_s"]


@pytest.mark.usefixtures("up")
def test_python_interface_connects_to_the_cluster_and_leaves_it_up(expected):
    few = SamplingParams(max_tokens=5, ignore_eos=True)
    with LLM.connect(NAME) as llm:
        outputs = llm.generate([*PROMPTS], few)
        assert [output.token_ids for output in outputs] == [expected[p][:5] for p in PROMPTS]
        # Without parameters the settings of the cluster hold.
        assert llm.generate(PROMPTS[0])[0].token_ids == expected[PROMPTS[0]]
    with LLM.connect() as llm:  # the only one
        assert llm.generate(PROMPTS[1], few)[0].token_ids == expected[PROMPTS[1]][:5]


@pytest.mark.parametrize("command", [pytest.param("generate", marks=pytest.mark.long), "status"])
def test_client_commands_import_neither_torch_nor_transformers(up, command):
    asked = ["--on", NAME, "--prompt", PROMPTS[0], "--chat"] if command == "generate" else [NAME]
    told = run_commands([command, *asked, "--json"], environment=up.environment)
    assert told == [(0, [])]


@pytest.mark.long
def test_client_that_leaves_cancels_its_request(up, expected, capfd):
    """Ctrl-C on a request that is being decoded and on one that waits; the next is as ever."""
    (before,) = status(capfd)
    reader = up.start("generate", "--on", NAME, "--prompt", PROMPTS[0], *LONG)
    assert reader.stdout.read(1)
    waiting = up.start("generate", "--on", NAME, "--prompt", PROMPTS[1], *LONG)
    until(lambda: status(capfd)[0]["queued"] == 1, PATIENCE_S)
    for user in (waiting, reader):
        user.send_signal(signal.SIGINT)
        user.communicate(timeout=ENDING_S)
        assert user.returncode == 130
    until(lambda: status(capfd)[0]["finished"] == before["finished"] + 2)
    (after,) = status(capfd)
    running = registry.find(NAME)
    newest = int(RedisConnection(running.url).call("GET", RedisKeys(running.namespace).counter))
    ends = [events_of(running.url, running.namespace, one)[-1] for one in (newest - 1, newest)]
    assert ends == [Finished("cancelled")] * 2
    assert (after["open"], after["queued"], after["epoch"]) == (0, 0, before["epoch"])
    assert main(["generate", "--on", NAME, "--json", "--prompt", PROMPTS[2]]) == 0
    assert json.loads(capfd.readouterr().out)["token_ids"] == expected[PROMPTS[2]]


@pytest.mark.usefixtures("up")
def test_a_request_chooses_its_length_and_its_sampling(expected, capfd):
    prompt = PROMPTS[0]
    ask = ["generate", "--on", NAME, "--prompt", prompt]
    assert main([*ask, "--json", "decode.max_new_tokens=3"]) == 0
    assert json.loads(capfd.readouterr().out)["token_ids"] == expected[prompt][:3]
    drawn = [*ask, "--json", "sampling.temperature=1", "sampling.seed=5"]
    assert main(drawn) == 0
    first = json.loads(capfd.readouterr().out)
    assert main(drawn) == 0
    assert json.loads(capfd.readouterr().out)["token_ids"] == first["token_ids"]
    assert first["token_ids"] != expected[prompt]
    assert first["stats"]["seed"] == 5
    # Text as it comes, statistics on the other stream.
    assert main(ask) == 0
    out, err = capfd.readouterr()
    tokenizer = AutoTokenizer.from_pretrained(resource_dir("demo") / "target")
    assert out == tokenizer.decode(expected[prompt]) + "\n"
    assert f"{NUM_TOKENS} tokens after" in err


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file per benchmark."""
    folder = tmp_path_factory.mktemp("data")
    for name, texts in BENCHMARKS.items():
        lines = [
            json.dumps({"id": f"{name}/{i}", "benchmark": name, "prompt": text})
            for i, text in enumerate(texts)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def answers(data: Path) -> dict[str, tuple[list[int], list[int]]]:
    """The cut prompt of every sample and the target's answer to it, by Hugging Face."""
    folder = resource_dir("demo") / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = load(data)
    ids = [tokenizer.encode(sample.prompt)[:CUT] for sample in samples]
    told = zip(samples, ids, cluster.reference(folder, ids, BENCH_TOKENS), strict=True)
    return {sample.id: (prompt, answer) for sample, prompt, answer in told}


@pytest.mark.usefixtures("up")
def test_figures_of_bench_are_one_object_and_its_file_has_all_requests(
    data, answers, tmp_path, capfd
):
    file = tmp_path / "figures.json"
    own = ["--dataset", str(data), "--concurrency", "3", "--prompt-tokens", str(CUT)]
    capfd.readouterr()  # what Hugging Face has said
    assert main(["bench", "--on", NAME, "--json", "--output", str(file), *own, *BENCH]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    figures = json.loads(out)
    assert (figures["completed"], figures["max_concurrency"]) == (4, 3)
    assert (figures["max_concurrent_requests"], figures["request_rate"]) == (3, "inf")
    assert figures["settings"] == [*SETTINGS, *BENCH]
    assert figures["total_output_tokens"] == 4 * BENCH_TOKENS
    assert figures["total_input_tokens"] == sum(len(prompt) for prompt, _ in answers.values())
    assert (figures["emulated"], figures["synthetic"], figures["lossy"]) == (False, False, False)
    for name in (
        "duration", "request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms",
        "mean_tpot_ms", "median_itl_ms", "p90_tbt_ms", "mean_e2el_ms", "tokens_per_step",
        "hit_rate", "accepted_per_batch", "pipeline_steps", "pipeline_tokens_per_step",
        "pipeline_rows_per_step", "max_output_tokens_per_s",
    ):  # fmt: skip
        assert figures[name] > 0, name
    assert figures["mean_tbt_ms"] <= figures["mean_itl_ms"]
    assert len(figures["stage_busy"]) == 2
    assert [row["benchmark"] for row in figures["benchmarks"]] == ["sums", "tales"]
    assert [row["completed"] for row in figures["benchmarks"]] == [1, 3]

    stored = json.loads(file.read_text())
    requests = stored.pop("requests")
    assert stored == figures
    assert {r["id"]: (r["prompt_ids"], r["token_ids"]) for r in requests} == answers
    for request in requests:
        assert len(request["token_ms"]) == BENCH_TOKENS
        assert request["token_ms"] == sorted(request["token_ms"])
        assert request["ttft_ms"] == request["token_ms"][0] > 0


@pytest.mark.long
def test_bench_records_the_targets_answers_for_a_synthetic_draft_and_labels_results(
    data, answers, tmp_path, capfd
):
    truth = tmp_path / "truth.jsonl"
    synthetic = ["proposer=synthetic", f"proposer.truth={truth}", "proposer.curve=['1:1.0']"]
    settings = ["cluster.stages=2", *BENCH, "policy.width=4", "policy.children=4", *synthetic]
    record_reference(load(data), truth, *settings, prompt_tokens=CUT)
    texts = [json.loads(line) for line in truth.read_text().splitlines()]
    assert len(texts) == 4
    for prompt, answer in answers.values():
        (text,) = (text for text in texts if text[: len(prompt) + BENCH_TOKENS] == prompt + answer)
        assert len(text) == len(prompt) + BENCH_TOKENS + TRUTH_MARGIN
    capfd.readouterr()
    own = ["--dataset", str(data), "--prompt-tokens", str(CUT), "--num-prompts", "2"]
    assert main(["bench", *own, *settings]) == 0
    out, _ = capfd.readouterr()
    assert "2 requests, 1 at once, 16 tokens" in out
    assert out.count("SYNTHETIC") == 4
    assert "EMULATED" not in out
    assert "LOSSY" not in out


def test_bench_names_a_prompt_that_does_not_fit_and_the_remedy(data, capsys):
    assert main(["bench", "--dataset", str(data), "model.context=9"]) == 2
    err = capsys.readouterr().err
    assert "'sums/0' has" in err
    assert "the context holds 9" in err
    assert "--prompt-tokens N" in err


def test_a_second_cluster_of_that_name_is_refused_and_the_first_goes_on(up, expected, capfd):
    for mode in ([], ["--detach"]):
        code, out, err = up.run("up", "--name", NAME, *mode, *SETTINGS)
        assert (code, out) == (2, "")
        assert err.startswith("pipespec: A cluster named 'lab' is up already")
        assert err.count("\n") == 1
    assert main(["generate", "--on", NAME, "--json", "--prompt", PROMPTS[0]]) == 0
    assert json.loads(capfd.readouterr().out)["token_ids"] == expected[PROMPTS[0]]


def test_the_password_is_in_the_card_alone(up, capsys):
    url = registry.find(NAME).url
    password = url.partition("password=")[2]
    assert len(password) > 20
    for process in up.processes():
        assert password not in " ".join(process.cmdline())
        assert all(password not in value for value in process.environ().values())
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert NAME in out
    assert "3/3" in out
    assert password not in out + json.dumps(status(capsys)) + up.log(NAME)


def test_a_stranger_on_the_machine_gets_nowhere(up, tmp_path, expected, capfd):
    """Another user says all sorts of things wherever `up` listens; the text stays the same."""
    if os.geteuid() != 0:
        pytest.skip("being another user needs root")
    seen = listening(process.pid for process in up.processes())
    assert_private(seen, {LOOPBACK})
    assert len({each.port for each in seen if each.kind == "tcp"}) == 2 * 2  # ends of two links
    faults = status(capfd)[0]["faults"]
    told = visit(seen, tmp_path / "ruined")
    assert {each.kind for each in told} == {"tcp"}
    for said in told.values():  # gloo says nothing to whom it does not know
        assert set(said) <= {"", "TimeoutError", "ConnectionResetError"}
    assert main(["generate", "--on", NAME, "--json", "--prompt", PROMPTS[0]]) == 0
    assert json.loads(capfd.readouterr().out)["token_ids"] == expected[PROMPTS[0]]
    assert status(capfd)[0]["faults"] == faults
    assert not (tmp_path / "ruined").exists()


@pytest.mark.long
def test_a_killed_cluster_fails_its_request_and_frees_its_name_and_ctrl_c_ends_the_next(up, capsys):
    """The last test of the running cluster. The next one stays in the foreground."""
    running = registry.find(NAME)
    pieces: list[str] = []

    def kill(piece: str) -> None:
        if not pieces:
            os.kill(running.owner.pid, signal.SIGKILL)
        pieces.append(piece)

    with pytest.raises(RankFailed, match=r"'lab' on \S+ ended before the request was finished"):
        ask_on(running, LONG, kill)
    until(lambda: not up.processes())
    assert not list((up.folder / "tmp").iterdir())
    assert (up.folder / "pipespec" / f"{NAME}.json").exists()
    assert status(capsys) == []
    assert main(["generate", "--on", NAME, "--prompt", "a"]) == 2
    assert f"No cluster named '{NAME}' is up" in capsys.readouterr().err
    assert main(["down"]) == 2
    assert "No cluster is up" in capsys.readouterr().err

    process = up.start("up", "--name", NAME, *SETTINGS)
    assert process.stdout.readline().startswith(f"The cluster '{NAME}' is ready: 3 ranks")
    assert registry.find(NAME).owner.pid == process.pid != running.owner.pid
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=ENDING_S)
    assert (process.returncode, out) == (0, "")
    # What the workers said, each with its name and the time, and how the cluster ended.
    *said, last = err.splitlines()
    assert all(f" {own_name()}/" in line for line in said), err
    assert last.endswith(f" {NAME}: SIGINT has ended the cluster")
    assert up.processes() == []
    assert up.files() == []


@pytest.mark.long
def test_down_fails_what_is_open_with_one_sentence(place, redis, capsys):
    """The cluster uses the user's Redis, told through standard input; it is left as it was."""
    settings = "\n".join([*SETTINGS, f"controller.url={redis.url}"])
    code, _, err = place.run("up", "--detach", "--name", NAME, "-", stdin=settings)
    assert (code, err) == (0, "")
    assert all("password" not in " ".join(process.cmdline()) for process in place.processes())
    assert "password" not in place.log(NAME)
    reader = place.start("generate", "--on", NAME, "--prompt", PROMPTS[0], *LONG)
    assert reader.stdout.read(1)
    waiting = place.start("generate", "--on", NAME, "--prompt", PROMPTS[1], *LONG)
    until(lambda: status(capsys)[0]["queued"] == 1, PATIENCE_S)
    assert status(capsys)[0]["open"] == 1
    assert place.run("down") == (0, f"{NAME} has ended.\n", "")
    *_, asked, ended = place.log(NAME).splitlines()
    assert f" {NAME}: `pipespec down` (process " in asked
    assert ended.endswith(f" {NAME}: SIGTERM has ended the cluster")
    for user in (reader, waiting):
        _, err = user.communicate(timeout=ENDING_S)
        assert user.returncode == 1
        assert err.count("\n") == 1
        assert "The cluster 'lab' on" in err
        assert "ended before the request was finished" in err
    assert place.processes() == []
    assert place.files() == []
    pipe = RedisConnection(redis.url)
    assert pipe.call("DBSIZE") == 0
    pipe.close()


def test_failed_start_gives_its_reason_and_leaves_nothing(place):
    code, out, err = place.run("up", "--detach", "cluster.stages=17")
    assert (code, out) == (2, "")
    assert "only 16 layers" in err
    assert err.count("\n") == 1
    assert place.files() == []
    assert list((place.folder / "pipespec").iterdir()) == []
    assert place.processes() == []


@pytest.mark.parametrize("by_down", [False, True])
def test_start_that_is_ended_while_it_loads_leaves_nothing(place, by_down):
    process = place.start("up", *([] if by_down else ["--detach"]), *SETTINGS)
    until(lambda: registry.entries(), PATIENCE_S)
    if by_down:
        assert main(["down", "default"]) == 0
    else:
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=ENDING_S)
    assert by_down or process.returncode == 128 + signal.SIGTERM
    until(lambda: not place.processes())
    assert place.files() == []
