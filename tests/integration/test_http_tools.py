"""A server whose model calls tools, token by token, as OpenAI's package receives it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from pipespec.client.model_info import ModelInfo
from pipespec.controller.embedded_redis import EmbeddedRedis
from tests.helpers.calling import MISTRAL, WEATHER, calling
from tests.helpers.scenes import Scene, play

CHAT = "/v1/chat/completions"
ARGUMENTS = '{"city": "Zürich {\\"}"}'
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Zürich?"}]
ASKED: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER], "model": "demo"}
TEXT = f"I look.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]get_time[ARGS]{{}}"
CALLS = [("get_weather", ARGUMENTS), ("get_time", "{}")]


@pytest.fixture
def scripted(demo: ModelInfo) -> tuple[ModelInfo, list[int]]:
    """A model, and the tokens that it says."""
    served = calling(demo, MISTRAL, "[TOOL_CALLS]", "[ARGS]")
    ids = served.tokenizer.encode(TEXT, add_special_tokens=False)
    hidden = served.tokenizer.decode(ids, skip_special_tokens=True)
    assert hidden == TEXT.replace("[TOOL_CALLS]", "").replace("[ARGS]", "")
    return served, ids


async def answer(scene: Scene, ids: list[int], reason: str = "stop") -> None:
    """The head says tokens, one at a time."""
    request, length = await scene.taken()
    for i, token in enumerate(ids):
        scene.say(request, length + i, token)
    scene.finish(request, reason)


def test_whole_reply_has_tool_calls(
    redis: EmbeddedRedis, scripted: tuple[ModelInfo, list[int]]
) -> None:
    served, ids = scripted

    async def story(scene: Scene) -> None:
        asking = asyncio.ensure_future(scene.http.post(CHAT, json=ASKED))
        await answer(scene, ids)
        reply = ChatCompletion.model_validate(
            (await asking).raise_for_status().json(), strict=True, extra="forbid"
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
        assert len({call.id for call in calls}) == 2
        assert reply.usage.completion_tokens == len(ids)
        # The conversation goes on with what OpenAI's package makes of the reply.
        results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in calls]
        later = ASKED | {"messages": [*HELLO, choice.message.to_dict(), *results]}
        asking = asyncio.ensure_future(scene.http.post(CHAT, json=later))
        await answer(scene, served.tokenizer.encode("It is sunny.", add_special_tokens=False))
        message = (await asking).raise_for_status().json()["choices"][0]["message"]
        assert message["content"] == "It is sunny." and not message.get("tool_calls")

    play(redis, served, story)


def test_reasoning_between_special_tokens_is_split_from_the_answer(
    redis: EmbeddedRedis, demo: ModelInfo
) -> None:
    served = calling(demo, MISTRAL + "{# [THINK] #}", "[THINK]", "[/THINK]")
    ids = served.tokenizer.encode("[THINK]Hm.[/THINK]It is sunny.", add_special_tokens=False)
    body = {"messages": HELLO, "model": "demo"}

    async def story(scene: Scene) -> None:
        asking = asyncio.ensure_future(scene.http.post(CHAT, json=body))
        await answer(scene, ids)
        reply = (await asking).raise_for_status().json()
        message = reply["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "It is sunny.")

    play(redis, served, story)
