"""The SDKs of other interfaces than OpenAI's chats, whole and streamed."""

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from pipespec.system.versions import package_version
from tests.helpers.sandbox import PATIENCE_S
from tests.helpers.serving import MODEL, Server

pytestmark = pytest.mark.slow
HELLO = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.fixture(scope="module")
def llama(server: Server) -> ollama.Client:
    return ollama.Client(server.url, timeout=PATIENCE_S)


ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": HELLO}
GREEDY = {"temperature": 0}  # its package has no field for it any more


def test_anthropic_package_reads_messages_whole_and_streamed(server, claude):
    told = claude.messages.create(system="Be kind.", extra_body=GREEDY, **ASKED)
    with claude.messages.stream(system="Be kind.", extra_body=GREEDY, **ASKED) as stream:
        text = "".join(stream.text_stream)
    (block,) = told.content
    assert block.type == "text" and block.text == text
    assert (told.stop_reason, told.usage.output_tokens) == ("max_tokens", 24)
    # The same as OpenAI's interface has.
    messages = [{"role": "system", "content": "Be kind."}, *HELLO]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    chat = server.http.post("/v1/chat/completions", json=body).json()
    assert chat["choices"][0]["message"]["content"] == text
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="Be kind.")  # type: ignore[arg-type]
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]


def test_openai_package_reads_responses_whole_and_streamed(client):
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
    asked |= {"input": "Tell me a story", "instructions": "Be kind."}
    told = client.responses.create(**asked)
    events = [*client.responses.create(stream=True, **asked)]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert told.output_text == text == events[-1].response.output_text


def test_responses_continue_earlier_ones(client):
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
    first = client.responses.create(**asked, input="Tell me a story")
    later = client.responses.create(**asked, input="Go on.", previous_response_id=first.id)
    assert later.previous_response_id == first.id
    whole = [
        {"role": "user", "content": "Tell me a story"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on."},
    ]
    same = client.responses.create(**asked, input=whole)  # type: ignore[call-overload]
    assert later.output_text == same.output_text
    assert later.usage.input_tokens == same.usage.input_tokens  # type: ignore[union-attr]
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            gone(first.id)
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        client.responses.retrieve(later.id, stream=True)
    unkept = client.responses.create(**asked, input="Hello", store=False)
    for unknown in (unkept.id, first.id, "resp_1"):
        with pytest.raises(openai.BadRequestError, match="There is no response") as refused:
            client.responses.create(**asked, input="Go on.", previous_response_id=unknown)
        assert refused.value.code == "previous_response_not_found"


def test_ollama_package_reads_answers_whole_and_streamed(llama):
    options = {"temperature": 0, "num_predict": 24}
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "options": options}
    told = llama.chat(**asked)
    assert (told.done_reason, told.eval_count) == ("length", 24)
    pieces = [*llama.chat(stream=True, **asked)]
    assert "".join(piece.message.content or "" for piece in pieces) == told.message.content
    made = llama.generate(model=MODEL, prompt=HELLO[0]["content"], options=options)
    assert made.response == told.message.content
    assert (llama.show(MODEL).modelinfo or {})["pipespec.context_length"] == 1024
    assert [each.model for each in llama.list().models] == [MODEL]
    assert [(each.model, each.context_length) for each in llama.ps().models] == [(MODEL, 1024)]
    assert llama._client.get("/api/version").json() == {"version": package_version("pipespec")}
