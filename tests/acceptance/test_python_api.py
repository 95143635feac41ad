"""The Python interface on real clusters: texts, streams, Ctrl-C, and nothing left behind."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipespec import LLM, AsyncLLM, SamplingParams
from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.errors import ConfigError, PipespecError
from pipespec.system.folders import resource_dir
from tests.helpers.sandbox import ENDING_S, PATIENCE_S, Sandbox
from tests.helpers.waiting import until
from tools.rig import cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PROMPTS = ["Once upon a time there was a king who", "The miller's daughter"]
NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS = {"cluster.devices": ["cpu"], "model.context": 512}
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> ModelInfo:
    return ModelInfo.of(decide(compose([])))


@pytest.fixture(scope="module")
def expected(model: ModelInfo) -> list[list[int]]:
    """What the target says after each prompt, by Hugging Face."""
    prompts = [model.encode(prompt) for prompt in PROMPTS]
    return cluster.reference(resource_dir("demo") / "target", prompts, NUM_TOKENS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with Sandbox(tmp_path_factory.mktemp("api")) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def llm(place: Sandbox) -> Iterator[LLM]:
    """A cluster of this process, which many tests use."""
    with pytest.MonkeyPatch.context() as patch:
        place.enter(patch)
        with LLM(stages=2, settings=SETTINGS) as llm:
            yield llm
        until(lambda: not place.processes())


def test_the_tokens_are_those_of_hugging_face(llm, model, expected):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert [output.prompt for output in outputs] == PROMPTS
    assert outputs[0].prompt_token_ids == model.encode(PROMPTS[0])
    assert all(output.finish_reason == "length" for output in outputs)
    assert len({output.request_id for output in outputs}) == 2
    assert outputs[0].metrics["ttft_ms"] > 0
    assert outputs[0].metrics["tokens_per_step"] > 0
    (by_ids,) = llm.generate(outputs[0].prompt_token_ids, GREEDY)
    assert (by_ids.token_ids, by_ids.prompt) == (expected[0], None)
    pieces = list(llm.stream(PROMPTS[0], GREEDY))
    assert len(pieces) > 1 and "".join(pieces) == by_ids.text


def test_chat_uses_the_chat_template(llm, model):
    messages = [{"role": "user", "content": "Tell me of a king"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == model.render(messages)
    by_hand = model.tokenizer.encode(output.prompt, add_special_tokens=False)
    assert output.token_ids == llm.generate(by_hand, GREEDY)[0].token_ids
    assert "".join(llm.stream_chat(messages, GREEDY)) == output.text
    assert [one.text for one in llm.chat([messages, messages], GREEDY)] == [output.text] * 2


def test_several_answers_differ_and_their_seeds_repeat_them(llm):
    params = SamplingParams(n=3, temperature=1, max_tokens=NUM_TOKENS, seed=7, logprobs=2)
    (output,) = llm.generate(PROMPTS[0], params)
    texts = [one.text for one in output.outputs]
    assert len(set(texts)) == 3
    assert [one.index for one in output.outputs] == [0, 1, 2]
    alone = SamplingParams(temperature=1, max_tokens=NUM_TOKENS, seed=8)
    assert llm.generate(PROMPTS[0], alone)[0].text == texts[1]
    first = output.outputs[0]
    chosen = [place[token] for place, token in zip(first.logprobs, first.token_ids, strict=True)]
    assert first.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
    assert output.prompt_logprobs is None


def test_each_prompt_may_have_its_own_parameters(llm, expected):
    longer, shorter = (SamplingParams(max_tokens=count) for count in (8, 3))
    outputs = llm.generate(PROMPTS[:2], [longer, shorter])
    assert [each.outputs[0].token_ids for each in outputs] == [expected[0][:8], expected[1][:3]]
    for wrong in ([longer], [longer, {}], {"max_tokens": 3}):
        with pytest.raises(ConfigError, match="or a list of 2, one for each prompt"):
            llm.generate(PROMPTS[:2], wrong)


def test_what_a_request_cannot_have_is_refused(llm):
    with pytest.raises(ConfigError, match="logit_bias names the token 99999"):
        llm.generate(PROMPTS[0], SamplingParams(logit_bias={99999: 1}))
    with pytest.raises(ConfigError, match=r"stop_token_ids is 2048, but must be .* 2047"):
        llm.generate(PROMPTS[0], SamplingParams(stop_token_ids=[2048]))
    with pytest.raises(PipespecError, match="A stream has one answer, but n is 2"):
        list(llm.stream(PROMPTS[0], SamplingParams(n=2, temperature=1)))


def test_several_threads_may_use_it_at_once(llm, expected):
    with ThreadPoolExecutor(4) as threads:
        for outputs in threads.map(lambda _: llm.generate(PROMPTS, GREEDY), range(4)):
            assert [output.token_ids for output in outputs] == expected


def test_a_stream_that_is_left_is_cancelled(llm):
    pieces = llm.stream(PROMPTS[0], LONG)
    assert next(pieces)
    pieces.close()
    # The one decoding slot of its KV is free again: as many tokens as fit are answered at once.
    assert len(llm.generate(PROMPTS[0], LONG)[0].token_ids) == 200


@pytest.mark.long
def test_many_requests_run_at_once_in_an_event_loop(place, expected, monkeypatch):
    place.enter(monkeypatch)

    async def story() -> None:
        async with AsyncLLM(stages=2, settings=SETTINGS) as llm:
            outputs = await asyncio.gather(
                *(llm.generate(PROMPTS[i % 2], GREEDY) for i in range(20))
            )
            assert [output.token_ids for (output,) in outputs] == expected * 10
            several = SamplingParams(n=8, temperature=1, max_tokens=2)
            pair = await asyncio.gather(*(llm.generate(p, several) for p in PROMPTS))
            ids = sorted(int(output.request_id) for (output,) in pair)
            assert ids[1] - ids[0] == 8, "all answers to a prompt are submitted in one call"
            pieces = [piece async for piece in llm.stream(PROMPTS[0], GREEDY)]
            assert "".join(pieces) == outputs[0][0].text
            leaving = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert (await llm.generate(PROMPTS[1], GREEDY))[0].token_ids == expected[1]
        with pytest.raises(PipespecError, match="The LLM is closed"):
            await llm.generate(PROMPTS[0])

    asyncio.run(story())


@pytest.mark.long
def test_an_llm_that_is_dropped_leaves_nothing(tmp_path, monkeypatch):
    apart = Sandbox(tmp_path)
    apart.enter(monkeypatch)
    llm = LLM(stages=1, settings=SETTINGS)
    assert apart.processes()
    del llm
    gc.collect()
    until(lambda: not apart.processes())
    assert not list((tmp_path / "tmp").iterdir())


SCRIPT = f"""
import torch
from pipespec import LLM, SamplingParams
settings = {SETTINGS!r}
llm = LLM(stages=2, settings=settings)
print(llm.generate({PROMPTS[0]!r}, SamplingParams(max_tokens=8))[0].token_ids, flush=True)
"""
# Ctrl-C ends a cell; the next one goes on with the same cluster.
INTERRUPTED = f"""
from pipespec import LLM, SamplingParams
llm = LLM(stages=2, settings={SETTINGS!r})
print("ready", flush=True)
try:
    for piece in llm.stream({PROMPTS[0]!r}, SamplingParams(max_tokens=400, ignore_eos=True)):
        print("piece", flush=True)
        input()
except KeyboardInterrupt:
    print("interrupted", flush=True)
try:
    print("generating", flush=True)
    while True:
        llm.generate([{PROMPTS[0]!r}] * 8, SamplingParams(max_tokens=400, ignore_eos=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(llm.generate({PROMPTS[0]!r}, SamplingParams(max_tokens=8))[0].token_ids, flush=True)
input()
"""


def start(place: Sandbox, script: Path, text: str) -> subprocess.Popen[str]:
    """A script in a process group of its own, as a terminal or a notebook's kernel has it."""
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place.environment,
        process_group=0,
    )


def left(place: Sandbox) -> list[object]:
    """Processes and temporary files of a sandbox."""
    return [*place.processes(), *(place.folder / "tmp").iterdir()]


@pytest.mark.long
def test_a_script_without_a_main_guard_runs_once_and_leaves_nothing_unclosed(tmp_path, expected):
    """After `import torch`, and the interpreter ends while the LLM is open."""
    with Sandbox(tmp_path) as place:
        process = start(place, tmp_path / "script.py", SCRIPT)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, "")
        assert out == f"{expected[0][:8]}\n"
        until(lambda: not left(place))


def test_ctrl_c_while_it_loads_ends_the_ranks_before_it_returns(tmp_path, monkeypatch):
    apart = Sandbox(tmp_path)
    apart.enter(monkeypatch)

    def interrupt() -> None:
        until(apart.processes)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        LLM(stages=1, settings=SETTINGS)
    assert not apart.processes()


def test_ctrl_c_ends_a_call_and_the_cluster_stays_usable(tmp_path, expected):
    with Sandbox(tmp_path) as place:
        process = start(place, tmp_path / "script.py", INTERRUPTED)
        for line, interrupt in (
            ("ready\n", False),
            ("piece\n", True),
            ("interrupted\n", False),
            ("generating\n", True),
            ("interrupted\n", False),
            (f"{expected[0][:8]}\n", True),
        ):
            assert process.stdout.readline() == line
            if interrupt:  # the whole group gets it, as from a terminal
                os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=ENDING_S)
        assert err.splitlines()[-1] == "KeyboardInterrupt"
        until(lambda: not left(place))
