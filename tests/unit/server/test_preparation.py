"""Threads that prepare requests, and requests that take too much time or hold too much."""

import asyncio
import json
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.server.api_errors import ApiError
from pipespec.server.preparation import (
    MAX_CONTAINERS,
    MAX_VALUES,
    PREVIEW_LENGTH,
    PREVIEW_TOKENS,
    PreparationPool,
    PreparedRequest,
    Preparer,
)
from tests.helpers.dialects import preparer

CONTEXT = 1024
CHAT = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
TEXT = json.dumps({"prompt": "Hello"}).encode()
LIMIT_S = 0.5
# Takes seconds, but not for ever: its thread outlives the request.
LOOPS = "{% for a in range(20000) %}{% for b in range(4000) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def served(demo: ModelInfo) -> ModelInfo:
    return replace(demo, context=CONTEXT)


def test_slow_template_is_refused_and_delays_no_other_request(served: ModelInfo) -> None:
    slow = replace(served, tokenizer=replace(served.tokenizer, chat_template=LOOPS))

    async def story(pool: PreparationPool) -> None:
        asked: list[Future[Preparer]] = [Future(), Future()]
        for future, model in zip(asked, (served, slow), strict=True):
            future.set_result(preparer(model))
        refused = asyncio.ensure_future(pool.prepare(asked[1], "/v1/chat/completions", CHAT))
        prepared = await pool.prepare(asked[0], "/v1/completions", TEXT)
        assert isinstance(prepared, PreparedRequest)
        assert not refused.done()
        with pytest.raises(ApiError, match=r"takes more than 0\.5 s to prepare") as found:
            await refused
        assert (found.value.status, found.value.code) == (400, "request_too_complex")

    with closing(PreparationPool(2, LIMIT_S)) as pool:
        asyncio.run(story(pool))


@pytest.mark.parametrize(
    "prompt", [[1] * (MAX_VALUES + 2 * CONTEXT), [[]] * (MAX_CONTAINERS + CONTEXT // 4)]
)
def test_body_of_too_many_values_is_refused(served: ModelInfo, prompt: list[object]) -> None:
    for too_many, code in ((0, None), (3, "request_too_complex")):
        body = json.dumps({"prompt": prompt[: len(prompt) - 3 + too_many]}).encode()
        with pytest.raises(ApiError) as refused:
            preparer(served).prepare("/v1/completions", body)
        assert refused.value.status == 400
        assert (refused.value.code == "request_too_complex") == (code is not None)


def test_preview_is_the_beginning_of_what_is_asked(served: ModelInfo) -> None:
    made = preparer(served)

    def preview(path: str, **body: object) -> str:
        prepared = made.prepare(path, json.dumps(body).encode())
        assert isinstance(prepared, PreparedRequest)
        return prepared.preview

    turns = [("system", "Be brief."), ("user", "First"), ("assistant", "Yes"), ("user", "Second")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert preview("/v1/chat/completions", messages=messages) == "Second"
    assert preview("/v1/chat/completions", messages=messages[:1]) == ""
    assert preview("/v1/messages", messages=messages[1:], max_tokens=1) == "Second"
    assert (
        preview("/v1/completions", prompt=["One " * 100, "Two"]) == ("One " * 100)[:PREVIEW_LENGTH]
    )
    ids = served.tokenizer.encode("Once upon a time", add_special_tokens=False)
    assert preview("/v1/completions", prompt=ids).strip() == "Once upon a time"
    assert len(preview("/v1/completions", prompt=100 * ids[:1])) <= PREVIEW_TOKENS * 10
