"""From the messages and tools of a chat to the text of its prompt, by the model's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipespec.client.model_info import ModelInfo, TemplateFailed
from pipespec.server.api_errors import invalid_field
from pipespec.server.message_schema import Tool
from pipespec.server.request_schema import ChatRequest, TokenizeRequest
from pipespec.server.tool_parsers.tool_choice import check_template
from pipespec.system.validation import shown

# The variables by which templates switch reasoning on and off: Qwen 3's and GLM's, DeepSeek's.
THINKING_VARIABLES = ("enable_thinking", "thinking")
# Variables that are the server's to set.
RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("conversation", "chat_template", "tokenize", "return_dict", "bos_token", "eos_token"),
)


def render_chat(
    served: ModelInfo, body: ChatRequest | TokenizeRequest, tools: Sequence[Tool] = ()
) -> str:
    """The messages of a request, and tools, in the model's chat template. Raises ApiError."""
    messages, continuing = body.messages or [], bool(body.continue_final_message)
    variables = thinking_variables(body) | (body.chat_template_kwargs or {})
    _check_options(body)
    check_template(served, messages, tools)
    try:
        return served.render(
            [message.for_template() for message in messages],
            answering=not continuing and body.add_generation_prompt is not False,
            continuing=continuing,
            tools=[tool.for_template() for tool in tools],
            variables=variables,
        )
    except TemplateFailed as error:
        subject = "messages and tools do" if tools else "messages do"
        raise invalid_field(
            "messages", f"{subject} not fit the model's chat template ({error}); change them."
        ) from None


def _check_options(body: ChatRequest | TokenizeRequest) -> None:
    for name in RESERVED:
        if name in (body.chat_template_kwargs or {}):
            raise invalid_field(
                "chat_template_kwargs", f"chat_template_kwargs sets {name}, which the server sets."
            )
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        raise invalid_field(
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true, but an answer either "
            "continues a message or begins one; leave one out.",
        )
    assert body.messages
    last = body.messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        raise invalid_field(
            "continue_final_message",
            "continue_final_message is true, but the last message is no text of the role "
            f"'assistant'; its role is {shown(last.role)}.",
        )


def thinking_variables(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The variables that mean `reasoning_effort` to templates that have a place for it."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    thinks = effort != "none"
    found: dict[str, Any] = dict.fromkeys(THINKING_VARIABLES, thinks)
    return found | ({"reasoning_effort": effort} if thinks else {})
