"""Chat templates that take content as parts or are several, and texts that one leaves out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipespec.api.prompts import tokenize_chats
from pipespec.client.model_info import ModelInfo
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.formats.gguf_tokenizer import load_tokenizer
from pipespec.errors import PromptError
from pipespec.server.api_errors import ApiError
from pipespec.system.folders import resource_dir
from tests.helpers import dialects
from tests.helpers.calling import HERMES, WEATHER, calling
from tests.helpers.dialects import parts

CHATS, MESSAGES = "/v1/chat/completions", "/v1/messages"
RESPONSES, OLLAMA = "/v1/responses", "/api/chat"
# As llava-hf's: images first, and then the texts, behind each a space.
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# As SmolVLM's, which fails for content without a first part.
SMOLVLM = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% endif %}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# Parts for the user alone.
MIXED = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'user' %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% else %}{{ message.content }}"
    "{% endif %}{% endfor %}"
)
# Parts for all, and calls whose arguments are texts.
TOOLS = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% for part in message.content %}{{ part.text | trim }}{% endfor %}"
    "{% for call in message.tool_calls or [] %}{{ '' + call.function.arguments }}{% endfor %}"
    "{% endfor %}{{ tools or '' }}{# <tool_call> #}"
)
CAPITALS = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% for part in message.content %}{{ part.text | upper }}{% endfor %}{% endfor %}"
)
TEXTS = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}LIST{% endif %}"
    "{% endfor %}"
)
ASKED = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": parts("How", "are you?")},
]
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00000", "content": "Seen."},
]


def prompt(served: ModelInfo, path: str, **body: Any) -> str:
    request = dialects.prepared(dialects.preparer(served), path, {"model": "demo"} | body)
    return dialects.prompt_of(served, request)


@pytest.mark.parametrize("content", ["Hello there", parts("Hello there"), parts("Hello", "there")])
@pytest.mark.parametrize("path", [CHATS, MESSAGES, RESPONSES, OLLAMA])
def test_template_that_expects_parts_gets_parts(demo, path, content):
    if path == OLLAMA:  # which has texts alone
        content = "Hello there"
    if path == RESPONSES and isinstance(content, list):
        content = [each | {"type": "input_text"} for each in content]
    field = "input" if path == RESPONSES else "messages"
    body = {field: [{"role": "user", "content": content}]}
    body |= {"max_tokens": 5} if path == MESSAGES else {}
    found = prompt(calling(demo, LLAVA), path, **body)
    assert found == "USER: Hello there ASSISTANT:"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (LLAVA, ASKED, "Be kind. USER: Hi ASSISTANT: Hello. USER: How are you? ASSISTANT:"),
        (SMOLVLM, ASKED[1:], "User: Hi|Assistant: Hello.|User: Howare you?|Assistant:"),
        (MIXED, ASKED, "<system>Be kind.<user>Hi<assistant>Hello.<user>Howare you?"),
        (CAPITALS, ASKED, "<system>BE KIND.<user>HI<assistant>HELLO.<user>HOWARE YOU?"),
        (TEXTS, ASKED, "<system>Be kind.<user>Hi<assistant>Hello.<user>How\nare you?"),
        (TOOLS, CALLED, '<user>Hi<assistant>{"a": 1}<tool>Seen.'),
        (TOOLS, [*CALLED[:2], CALLED[2] | {"content": parts(" a ", "b")}], "<tool>ab"),
    ],
)
def test_each_role_has_the_form_that_the_template_takes(demo, template, messages, expected):
    assert prompt(calling(demo, template), CHATS, messages=messages).endswith(expected)


def test_message_of_parts_is_continued(demo):
    messages = [*ASKED, {"role": "assistant", "content": parts("I", "am ")}]
    found = prompt(calling(demo, LLAVA), CHATS, messages=messages, continue_final_message=True)
    assert found.endswith("ASSISTANT: I am ")


def test_python_interface_has_the_same_prompts(demo):
    served = calling(demo, LLAVA)
    for content in ("Hello there", parts("Hello", "there")):
        (made,) = tokenize_chats(served, [{"role": "user", "content": content}])
        assert made.text == "USER: Hello there ASSISTANT:"
    with pytest.raises(PromptError, match="leaves out the text of message 1, of the user"):
        tokenize_chats(calling(demo, "<s>"), [{"role": "user", "content": "s"}])


LAST = "{% for m in messages %}{{ m.content if loop.last }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "left_out"),
    [
        # Nothing but the role remains of a text that is also a part of another.
        ("{% for m in messages %}USER:{% endfor %}", [("user", "U")], "1, of the user"),
        ("{{ messages[0].content[0].text }}", [("user", parts("a", "b"))], "1, of the user"),
        ("{{ messages[0].content[:3] }}", [("user", "Hello there")], "1, of the user"),
        (LAST, [("user", "a"), ("assistant", "b"), ("user", "a")], "1, of the user"),
        # It fails for other texts.
        ("{{ 1 // (messages[0].content == 'Hello a') }}", [("user", "Hello a")], "1, of the user"),
        (LAST, [("tool", "a"), ("user", "a")], "1, of the tool"),
    ],
)
def test_text_that_the_template_leaves_out_is_refused(demo, template, messages, left_out):
    body = [
        {"role": role, "content": content} | ({"tool_call_id": "a"} if role == "tool" else {})
        for role, content in messages
    ]
    with pytest.raises(ApiError, match=f"leaves out the text of message {left_out}") as refused:
        prompt(calling(demo, template), CHATS, messages=body)
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[0].content | trim | upper }}", " a "),
        ("{{ messages[0].content | tojson }}", 'a "b"'),
        ("{{ messages[0].content | escape | lower }}", '<A> & "b"'),
        ("{{ messages[0].content[:40] }}", "Hello there " * 9),
        ("{{ messages[0].content.split() | join('\n') }}", "Hello there"),
        # They fail for other texts.
        ("{{ {'<A B>': 1}[messages[0].content] // 1 }}{{ messages[0].content | escape }}", "<A B>"),
        ("{{ 1 // (messages[0].content == 'a') }}{{ messages[0].content }}", "a"),
        ("{{ messages[0].content | trim }}.", "  "),
    ],
)
def test_text_that_the_template_changes_is_no_error(demo, template, content):
    served = calling(demo, template)
    assert prompt(served, CHATS, messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # As the first Phi-3's, and R1's, which keeps the last.
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "ab"),
        ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}", "aBe brief.b"),
    ],
)
def test_system_text_that_the_template_leaves_out_is_logged_once(demo, template, expected, caplog):
    served = calling(demo, template)
    texts = [("system", "Be kind."), ("user", "a"), ("system", "Be brief."), ("user", "b")]
    body = [{"role": role, "content": content} for role, content in texts]
    for _ in range(2):
        assert prompt(served, CHATS, messages=body) == expected
    (line,) = caplog.messages
    assert "leaves out the text of message 1, of the system" in line


DEFAULT = "{% for m in messages %}default {{ m.content }}{% endfor %}"
FOR_TOOLS = HERMES.replace("{% if tools %}", "{% if tools %}for tools ")


def _listed(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"default": DEFAULT, "tool_use": FOR_TOOLS, "rag": "{{ documents }}"}
    config["chat_template"] = [{"name": k, "template": v} for k, v in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _in_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(DEFAULT)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(FOR_TOOLS)


@pytest.mark.parametrize("write", [_listed, _in_files])
def test_template_is_chosen_as_transformers_does(demo, tmp_path, write):
    folder = Path(shutil.copytree(resource_dir("demo") / "target", tmp_path / "target"))
    (folder / "chat_template.jinja").unlink()
    tokenizer.load(folder)  # what was cached of the folder before is not used
    write(folder)
    found = tokenizer.load(folder)
    served = ModelInfo("a", demo.vocab_size, 2000, (0,), found)
    theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    messages = [{"role": "user", "content": "Hello"}]
    for tools in ([], [WEATHER]):
        expected = theirs.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        assert expected.startswith("for tools" if tools else "default")
        assert prompt(served, CHATS, messages=messages, tools=tools) == expected
    with pytest.raises(ApiError, match="has no place for them"):
        prompt(served, CHATS, messages=CALLED)


@pytest.mark.parametrize("name", ["tokenizer.chat_template", "tokenizer.chat_template.default"])
def test_gguf_file_may_have_a_template_for_tools(name):
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1],
        name: DEFAULT,
    }
    assert load_tokenizer(fields.get)[1] == DEFAULT
    fields["tokenizer.chat_template.tool_use"] = FOR_TOOLS
    assert load_tokenizer(fields.get)[1] == {"default": DEFAULT, "tool_use": FOR_TOOLS}


def test_template_of_a_processor_serves_where_the_tokenizer_has_none(demo, tmp_path):
    folder = Path(shutil.copytree(resource_dir("demo") / "target", tmp_path / "target"))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": LLAVA}))
    assert tokenizer.load(folder).chat_template == demo.tokenizer.chat_template != LLAVA
    (folder / "chat_template.jinja").unlink()
    assert tokenizer.load(folder).chat_template == LLAVA


def test_without_a_default_tools_are_needed(demo):
    served = calling(demo, {"tool_use": FOR_TOOLS})  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "Hello"}]
    assert prompt(served, CHATS, messages=messages, tools=[WEATHER]).startswith("for tools")
    with pytest.raises(ApiError, match="there is none named 'default'"):
        prompt(served, CHATS, messages=messages)
