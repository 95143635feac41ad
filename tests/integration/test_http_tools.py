"""A server whose model calls tools, token by token, as OpenAI's package receives it."""

import asyncio
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from pipespec.client.model_info import ModelInfo
from tests.helpers.calling import MISTRAL, WEATHER, calling
from tests.helpers.scenes import Scene, play

SPECIAL = ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")
CHAT = "/v1/chat/completions"
ARGUMENTS = '{"city": "Zürich {\\"}"}'
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Zürich?"}]
ASKED: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER], "model": "demo"}
TEXT = (
    f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"
    "[TOOL_CALLS]get_time[ARGS]{}"
)
CALLS = [("get_weather", ARGUMENTS), ("get_time", "{}")]


@pytest.fixture
def scripted(demo: ModelInfo) -> tuple[ModelInfo, list[int]]:
    """A model, and the tokens that it says."""
    served = calling(demo, f"{MISTRAL}{{# {' '.join(SPECIAL[:2])} #}}", *SPECIAL)
    ids = served.tokenizer.encode(TEXT, add_special_tokens=False)
    hidden = served.tokenizer.decode(ids, skip_special_tokens=True)
    assert hidden == re.sub(r"\[/?[A-Z_]+\]", "", TEXT), "they are special tokens"
    return served, ids


async def answer(scene: Scene, ids: list[int], reason: str = "stop") -> None:
    """The head says tokens, one at a time."""
    request, length = await scene.taken()
    for i, token in enumerate(ids):
        scene.say(request, length + i, token)
    scene.finish(request, reason)


def test_whole_reply_has_reasoning_text_and_tool_calls(redis, scripted):
    served, ids = scripted

    async def story(scene: Scene) -> None:
        asking = asyncio.ensure_future(scene.http.post(CHAT, json=ASKED))
        await answer(scene, ids)
        body = (await asking).raise_for_status().json()
        thought = body["choices"][0]["message"].pop("reasoning_content")  # OpenAI has none
        reply = ChatCompletion.model_validate(body, strict=True, extra="forbid")
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert thought == "Hm."
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
