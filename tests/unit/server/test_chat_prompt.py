import json
from typing import Any

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.server.api_errors import ApiError
from pipespec.server.chat_prompt import render_chat
from pipespec.server.request_schema import ChatRequest
from tests.helpers import dialects
from tests.helpers.calling import calling

HELLO = {"role": "user", "content": "Hello"}
BEGUN = {"role": "assistant", "content": "Once upon "}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{{ message.reasoning_content or '' }}{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{{ 'thinks' if enable_thinking }}{{ reasoning_effort or '' }}{{ mood or '' }}"
)


@pytest.fixture(scope="module")
def served(demo: ModelInfo) -> ModelInfo:
    return calling(demo, TEMPLATE)


def rendered(served: ModelInfo, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = ChatRequest.model_validate({"messages": messages} | fields)
    return render_chat(served, body)


def test_prompt_ends_where_the_fields_say(served):
    assert rendered(served, [HELLO]) == "<user>Hello</s><assistant>"
    assert rendered(served, [HELLO], add_generation_prompt=False) == "<user>Hello</s>"
    continued = rendered(served, [HELLO, BEGUN], continue_final_message=True)
    assert continued == "<user>Hello</s><assistant>Once upon "


def test_variables_reach_the_template(served):
    asked = {"mood": "glad"}
    assert rendered(served, [HELLO], chat_template_kwargs=asked).endswith("glad")
    assert rendered(served, [HELLO], reasoning_effort="low").endswith("thinkslow")
    assert rendered(served, [HELLO], reasoning_effort="none").endswith("<assistant>")
    own = {"enable_thinking": False}
    assert rendered(served, [HELLO], reasoning_effort="low", chat_template_kwargs=own).endswith(
        "<assistant>low"
    )
    thought = BEGUN | {"reasoning_content": "Hm."}
    assert "<assistant>Hm.Once upon </s>" in rendered(served, [thought, HELLO])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chat_template_kwargs": {"mood": "glad"}},
        {"reasoning_effort": "low"},
        {"add_generation_prompt": False},
        {"messages": [HELLO, BEGUN], "continue_final_message": True},
    ],
)
def test_tokens_of_messages_are_those_of_the_chat(served, fields):
    preparer, body = dialects.preparer(served), {"messages": [HELLO]} | fields
    told = preparer.prepare("/tokenize", json.dumps(body).encode())
    assert isinstance(told, bytes)
    asked = dialects.prepared(preparer, "/v1/chat/completions", body)
    assert json.loads(told)["tokens"] == [*asked.parsed.prompts[0]]


@pytest.mark.parametrize(
    ("messages", "fields", "said"),
    [
        ([HELLO], {"continue_final_message": True}, "its role is 'user'"),
        (
            [HELLO, BEGUN],
            {"continue_final_message": True, "add_generation_prompt": True},
            "leave one out",
        ),
        ([HELLO], {"chat_template_kwargs": {"messages": []}}, "which the server sets"),
        ([BEGUN | {"content": ""}], {"continue_final_message": True}, "no text of the role"),
    ],
)
def test_options_that_contradict_are_refused(served, messages, fields, said):
    with pytest.raises(ApiError, match=said):
        rendered(served, messages, **fields)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content }}", "leaves the last message out"),
        ("{{ raise_exception('no') }}", "TemplateError: no"),
    ],
)
def test_template_that_cannot_render_is_refused(served, template, said):
    with pytest.raises(ApiError, match=said) as refused:
        rendered(calling(served, template), [HELLO, BEGUN], continue_final_message=True)
    assert (refused.value.status, refused.value.param) == (400, "messages")


CALL = {"id": "call_1", "function": {"name": "look", "arguments": '{"at": "é"}'}}
CONVERSATION = [
    HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Seen."},
]
ROUNDS = (
    "{% for m in messages %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}PART{% endfor %}{% endfor %}"
)
FUNCTION = "c.function.arguments"


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (f"{{{{ {FUNCTION}.at }}}}", "é"),
        (f"{{{{ {FUNCTION} | tojson }}}}", '{"at": "é"}'),
        # As DeepSeek's templates have it.
        (f"{{{{ '```' + {FUNCTION} }}}}", '```{"at": "é"}'),
        (f"{{% if m.content is none %}}{{{{ {FUNCTION} | tojson }}}}{{% endif %}}", '{"at": "é"}'),
        (f"{{% if m.content is none %}}{{{{ '' + {FUNCTION} }}}}{{% endif %}}", '{"at": "é"}'),
    ],
)
def test_earlier_calls_have_the_form_that_the_template_wants(served, part, shown):
    assert rendered(calling(served, ROUNDS.replace("PART", part)), CONVERSATION) == (
        f"Hello{shown}Seen."
    )
