"""What users of the Python interface may pass as a prompt, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipespec.client.chat_template import TemplateFailed
from pipespec.client.model_info import ModelInfo
from pipespec.errors import PromptError

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]


@dataclass(frozen=True)
class Tokenized:
    """A prompt; `text` is None if it was given as token ids."""

    text: str | None
    token_ids: Sequence[int]


def tokenize_prompts(model: ModelInfo, given: Prompt | Sequence[Prompt]) -> list[Tokenized]:
    """One prompt or several. Raises PromptError."""
    if isinstance(given, str) or _is_ids(given):
        return [_tokenized(model, given)]
    if not isinstance(given, Sequence) or not given:
        raise PromptError("There is no prompt; pass a text, or a list of texts.")
    return [_tokenized(model, each) for each in given]


def tokenize_chats(model: ModelInfo, given: Any) -> list[Tokenized]:
    """One conversation or several, in the model's chat template. Raises PromptError."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise PromptError('There is no message; pass a list as [{"role": "user", "content": ...}].')
    if all(isinstance(each, Mapping) for each in given):
        return [_conversation(model, given)]
    return [_conversation(model, each) for each in given]


def _conversation(model: ModelInfo, messages: Any) -> Tokenized:
    whole = isinstance(messages, Sequence) and messages and not isinstance(messages, str)
    if not whole or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise PromptError(
            'A conversation must be a list of messages such as {"role": "user", "content": "..."}.'
        )
    try:
        text = model.render(messages)
    except TemplateFailed as error:
        raise PromptError(
            f"The chat template of {model.target} makes no text of the messages ({error}); change "
            "them, or use a model with a chat template."
        ) from None
    # The template has put in the special tokens that the model wants.
    return Tokenized(text, model.tokenize(text, special=False))


def _tokenized(model: ModelInfo, prompt: Any) -> Tokenized:
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("The prompt is empty; pass at least one character.")
        return Tokenized(prompt, model.tokenize(prompt))
    if not _is_ids(prompt):
        raise PromptError(f"A prompt is {prompt!r:.60}, but must be a text or a list of token ids.")
    model.check_prompt(prompt)
    return Tokenized(None, tuple(prompt))


def _is_ids(prompt: Any) -> bool:
    sequence = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    return sequence and len(prompt) > 0 and all(type(token) is int for token in prompt)
