"""What a client needs to know of a cluster's model, so that it reads no checkpoint."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipespec.client.chat_template import (
    PROBE_TOOL,
    MessageForm,
    TemplateFailed,
    find_form,
    left_out,
    with_end,
)
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.errors import ModelError, PromptError
from pipespec.head.proposers.token_map import token_map
from pipespec.system.validation import is_whole, reason

logger = logging.getLogger(__name__)

# A text with more characters than this per token of the context is looked at in part first.
CHARACTERS = 16


@dataclass(frozen=True)
class ModelInfo:
    """The model of a cluster, as its users see it: its folder or hub id where the cluster was
    started, the rows of its embedding, tokens of prompt and answer at most, and tokens that end a
    text. Everything takes `time_scale` times longer than is reported; `synthetic`: draft tokens are
    made from the answer."""

    target: str
    vocab_size: int
    context: int
    eos: tuple[int, ...]
    tokenizer: BackendTokenizer = field(repr=False)
    time_scale: float | None = None
    synthetic: bool = False

    @classmethod
    def of(cls, deployment: Deployment) -> ModelInfo:
        """The model of a cluster that is about to start; that a draft has other tokens is logged.
        Raises ModelError where these are of no use."""
        found = tokenizer.load(deployment.target.path)
        for name, info in deployment.models[1:]:
            if (tokens := token_map(deployment.target, info, found)) is not None:
                logger.warning(
                    "The %s has another vocabulary: %.0f %% of its tokens are the target's too; "
                    "it proposes these, and others that texts have had.",
                    *(name, 100 * tokens.share),
                )
        return cls(
            target=full_name(deployment.config.model.target),
            vocab_size=deployment.target.vocab_size,
            context=deployment.context,
            eos=deployment.target.eos,
            tokenizer=found,
            time_scale=deployment.config.time_scale,
            synthetic=deployment.config.proposer.synthetic,
        )

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
        `continuing` up to the end of the last message's content, or reasoning if it has none.
        `tools` are functions that it may call, as Transformers gives them to templates, and
        `variables` are for the template alone. Raises TemplateFailed, also if the model has no
        chat template, or one that leaves out a text of a user or a tool; one that leaves out a
        system's is logged once, as Transformers and vLLM render such prompts."""
        template, reader = self.chat_template(tools=bool(tools)), self.tokenizer
        if not template:
            raise TemplateFailed("there is none" + " named 'default'" * bool(reader.chat_template))

        def apply(conversation: list[dict[str, Any]], **options: Any) -> str:
            return reader.apply_chat_template(conversation, chat_template=template, **options)

        key = template, bool(tools)
        if key not in self._forms:
            probed = [PROBE_TOOL] if tools else None
            self._forms[key] = find_form(lambda probe: apply(probe, tools=probed))
        conversation = [self._forms[key].adapted(each) for each in messages]
        options = {
            **(variables or {}),
            "tools": [dict(tool) for tool in tools] or None,
            "add_generation_prompt": answering,
        }
        mark = f"<{secrets.token_hex(16)}>"
        if continuing:
            conversation[-1] = with_end(conversation[-1], mark)
        try:
            text = apply(conversation, **options)
        except Exception as error:  # noqa: BLE001 - a template is a program of somebody else's
            why = reason(error)
            raise TemplateFailed(why) from None
        if not isinstance(text, str) or not is_whole(text):
            raise TemplateFailed("what it makes is no text")
        if continuing and mark not in text:
            raise TemplateFailed("it leaves the last message out, which is to be continued")
        for number in left_out(lambda marked: apply(marked, **options), conversation, text):
            role = conversation[number]["role"]
            why = f"it leaves out the text of message {number + 1}, of the {role}"
            if role != "system":
                raise TemplateFailed(why)
            if key not in self._logged:
                self._logged.add(key)
                logger.warning("The chat template of %s drops texts: %s.", self.target, why)
        return text.rpartition(mark)[0] if continuing else text

    def chat_template(self, *, tools: bool = False) -> str | None:
        """The chat template, of several the one that Transformers takes with tools or without."""
        found = self.tokenizer.chat_template
        if found is None or isinstance(found, str):
            return found
        return (tools and found.get("tool_use")) or found.get("default")

    @cached_property
    def _forms(self) -> dict[tuple[str, bool], MessageForm]:
        """Those in which templates take messages, without tools or with them."""
        return {}

    @cached_property
    def _logged(self) -> set[tuple[str, bool]]:
        """The templates of which it was logged that they leave out a system's text."""
        return set()

    def _as_chat(self, prompt: str) -> str:
        if not self.chat_template():
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


def full_name(target: str) -> str:
    """A model that was set by `target`: its absolute path, or its id on the hub."""
    return str(Path(target).absolute() if Path(target).exists() else target)
