"""Prompts as token ids: conversations in the model's template, texts, and ids as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pipespec.client.served import ServedModel, TemplateFailed
from pipespec.server.errors import ApiError, refused
from pipespec.server.messages import Message, Tool
from pipespec.server.tools.use import check_template

# A text with more characters than this per token of the context is looked at in part first.
CHARACTERS = 64
TOO_LONG = "context_length_exceeded"


def conversation(
    served: ServedModel,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    answering: bool = True,
) -> str:
    """Messages in the model's chat template, which is shown the tools. Raises ApiError."""
    check_template(served, messages, tools)
    try:
        return served.render(
            [message.for_template() for message in messages],
            answering=answering,
            tools=[tool.for_template() for tool in tools],
        )
    except TemplateFailed as error:
        told = "messages and tools do" if tools else "messages do"
        raise refused(
            "messages", f"{told} not fit the model's chat template ({error}); change them."
        ) from None


async def encode(
    served: ServedModel, text: str, param: str, *, special: bool = True
) -> Sequence[int]:
    """The ids of a prompt, which leave room for an answer. Raises ApiError."""
    look = CHARACTERS * served.context
    if len(text) > look:
        # Megabytes take seconds; their beginning tells.
        begins = await tokens(served, text[:look], special=special)
        if len(begins) >= 2 * served.context:
            raise _too_long(served, param, f"more than {len(begins) // 2}")
    return check_tokens(served, await tokens(served, text, special=special), param)


async def tokens(served: ServedModel, text: str, *, special: bool) -> list[int]:
    """The ids of a text, found in a thread."""
    return await asyncio.to_thread(served.tokenizer.encode, text, add_special_tokens=special)


def check_tokens(served: ServedModel, ids: Sequence[int], param: str) -> Sequence[int]:
    """Ids that can be a prompt. Raises ApiError."""
    if not ids:
        raise refused(param, f"{param} has no tokens, but must have one at least.")
    if len(ids) >= served.context:
        raise _too_long(served, param, str(len(ids)))
    for token in ids:
        check_token(served, token, param)
    return ids


def check_token(served: ServedModel, token: int, param: str) -> None:
    """Raise ApiError unless the model has such a token."""
    if not 0 <= token < served.vocab_size:
        shown = token if abs(token) < 10**20 else "of too many digits"
        raise refused(
            param,
            f"{param} holds the token id {shown}, but they go from 0 to {served.vocab_size - 1}.",
        )


def _too_long(served: ServedModel, param: str, tokens: str) -> ApiError:
    return refused(
        param,
        f"{param} has {tokens} tokens, but the context holds {served.context} and needs room for "
        "an answer; shorten it.",
        TOO_LONG,
    )


def decoded(served: ServedModel, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    return served.tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
