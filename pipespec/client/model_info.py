"""What a client needs to know of a cluster's model, so that it reads no checkpoint."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.checkpoint.tokenizer import (
    BackendTokenizer,
    ChatTokenizer,
    compare_vocabularies,
)
from pipespec.engine.llguidance_backend import Grammars
from pipespec.errors import ModelError, PromptError
from pipespec.system.validation import is_whole, reason

# A text with more characters than this per token of the context is looked at in part first.
CHARACTERS = 16
# An argument of the probe, which the text must have.
MARK = "probe-of-tool-calls"
# Mistral's templates accept ids of nine letters and digits alone.
PROBE_ID = "probe0000"

if TYPE_CHECKING:  # `pipespec status` can do without
    from pipespec.cluster.deployment.deployment import Deployment


@dataclass(frozen=True)
class ModelInfo:
    """The model of a cluster, as its users see it: its folder or hub id where the cluster was
    started, the rows of its embedding, tokens of prompt and answer at most, and tokens that end a
    text. `backend` is its tokenizer; None: Transformers must read `target` on the machine that
    asks. Everything takes `time_scale` times longer than is reported; `synthetic`: draft tokens are
    made from the answer."""

    target: str
    vocab_size: int
    context: int
    eos: tuple[int, ...]
    backend: BackendTokenizer | None = field(repr=False)
    time_scale: float | None = None
    synthetic: bool = False

    @classmethod
    def of(cls, deployment: Deployment) -> ModelInfo:
        """The model of a cluster that is about to start, whose drafts have the same tokens. Raises
        ModelError."""
        found = tokenizer.load(deployment.target.path)
        for _, info in deployment.models[1:]:
            compare_vocabularies(found, tokenizer.load(info.path))
        return cls(
            target=full_name(deployment.config.model.target),
            vocab_size=deployment.target.vocab_size,
            context=deployment.context,
            eos=deployment.target.eos,
            backend=found if isinstance(found, BackendTokenizer) else None,
            time_scale=deployment.config.time_scale,
            synthetic=deployment.config.proposer.synthetic,
        )

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Raises ModelError if this machine has not the model that it must be read from."""
        if self.backend is not None:
            return self.backend
        return tokenizer.load(Path(self.target))

    def grammars(self) -> Grammars:
        """What compiles grammars for its tokens, to see that they can be followed."""
        grammars = Grammars(lambda: self.tokenizer, self.vocab_size, self.eos)
        grammars.warm()
        return grammars

    def encode(self, prompt: str, *, chat: bool = False, answer: int | None = 1) -> list[int]:
        """The token ids of a prompt, with `chat` in the model's chat template. Raises PromptError,
        also for one that leaves no room for so many tokens of an answer (None: any length is
        right), and ModelError for a template that fails."""
        if not prompt:
            raise PromptError("The prompt is empty; pass --prompt TEXT or --prompt-file FILE.")
        text = self._as_chat(prompt) if chat else prompt
        return self.tokenize(text, special=not chat, answer=answer)

    def tokenize(
        self, text: str, name: str = "The prompt", *, special: bool = True, answer: int | None = 1
    ) -> list[int]:
        """The token ids of a prompt, which errors call `name`, with the special tokens around it if
        `special`. Raises PromptError as `encode`."""
        look = CHARACTERS * self.context
        if answer is not None and len(text) > look:
            # Megabytes take seconds; their beginning is enough.
            begins = self.tokenizer.encode(text[:look], add_special_tokens=special)
            if len(begins) >= 2 * self.context:
                raise self._too_long(name, f"more than {len(begins) // 2}", answer)
        ids = self.tokenizer.encode(text, add_special_tokens=special)
        self.check_prompt(ids, name, answer=answer)
        return ids

    def check_prompt(
        self, ids: Sequence[int], name: str = "The prompt", *, answer: int | None = 1
    ) -> None:
        """Raise PromptError unless token ids can be a prompt (`encode`)."""
        if not ids:
            raise PromptError(f"{name} has no tokens, but must have one at least.")
        if answer is not None and len(ids) + answer > self.context:
            raise self._too_long(name, str(len(ids)), answer)
        self.check_tokens(ids, name)

    def check_tokens(self, ids: Sequence[int], name: str) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                shown = token if abs(token) < 10**20 else "of too many digits"
                raise PromptError(
                    f"{name} has the token id {shown}, but they go from 0 to {self.vocab_size - 1}."
                )

    def _too_long(self, name: str, tokens: str, answer: int) -> PromptTooLong:
        room = " and needs room for an answer" if answer else ""
        return PromptTooLong(
            f"{name} has {tokens} tokens, but the context holds {self.context}{room}; shorten it "
            "or raise model.context."
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answering: bool = True,
        continuing: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, with `answering` up to where the model's answer begins, with
        `continuing` up to the end of the last message's content. `tools` are functions that it may
        call, as Transformers gives them to templates, and `variables` are for the template alone.
        Raises TemplateFailed, also if the model has no chat template."""
        if not self.tokenizer.chat_template:
            raise TemplateFailed("there is none")
        conversation = [self._call_form.adapted(each) for each in messages]
        mark = f"<{secrets.token_hex(16)}>"
        if continuing:
            conversation[-1]["content"] += mark
        try:
            text = self.tokenizer.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=answering,
                tokenize=False,
                **(variables or {}),
            )
        except Exception as error:  # noqa: BLE001 - a template is a program of somebody else's
            why = reason(error)
            raise TemplateFailed(why) from None
        if not isinstance(text, str) or not is_whole(text):
            raise TemplateFailed("what it makes is no text")
        if continuing and mark not in text:
            raise TemplateFailed("it leaves the last message out, which is to be continued")
        return text.rpartition(mark)[0] if continuing else text

    @cached_property
    def _call_form(self) -> CallForm:
        return find_call_form(
            lambda conversation: self.tokenizer.apply_chat_template(conversation, tokenize=False)
        )

    def _as_chat(self, prompt: str) -> str:
        if not self.tokenizer.chat_template:
            raise PromptError(
                f"--chat needs a chat template, but the tokenizer of {self.target} has none."
            )
        try:
            return self.render([{"role": "user", "content": prompt}])
        except TemplateFailed as error:
            raise ModelError(
                f"The chat template of {self.target} fails ({error}); correct it, or leave --chat "
                "out."
            ) from None


class PromptTooLong(PromptError):
    """The prompt leaves no room for an answer."""


class TemplateFailed(Exception):
    """Why a chat template made no text, as a clause."""


def full_name(target: str) -> str:
    """A model that was set by `target`: its absolute path, or its id on the hub."""
    return str(Path(target).absolute() if Path(target).exists() else target)


# How a chat template wants earlier tool calls: the forms differ between families of models.


@dataclass(frozen=True)
class CallForm:
    """The form of messages with tool calls. `as_json`: arguments are a JSON text instead of an
    object, as DeepSeek V3's template joins them with other texts. `no_content`: a message without
    text has None as its content, as DeepSeek R1's distilled models leave the calls out beside an
    empty text."""

    as_json: bool = False
    no_content: bool = False

    def adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template wants it, from one as Transformers has it: arguments are
        objects and the content is a text."""
        changed = dict(message)
        calls = message.get("tool_calls")
        if calls and self.no_content and not message["content"]:
            changed["content"] = None
        if calls and self.as_json:
            changed["tool_calls"] = [_with_json(call) for call in calls]
        return changed


FORMS = [CallForm(*form) for form in product((False, True), repeat=2)]


def find_call_form(render: Callable[[list[dict[str, Any]]], str]) -> CallForm:
    """The first form with which a template shows the arguments of a call; the usual one if there is
    none. `render` applies the template to a conversation; it may raise any exception."""
    for form in FORMS:
        try:
            text = render([form.adapted(message) for message in _probe()])
        except Exception:  # noqa: BLE001 - a template may fail in any way
            continue
        if MARK in text:
            return form
    return FORMS[0]


def _probe() -> list[dict[str, Any]]:
    call = {
        "id": PROBE_ID,
        "type": "function",
        "function": {"name": "probe", "arguments": {"text": MARK}},
    }
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "probe", "tool_call_id": PROBE_ID, "content": "b"},
    ]


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
