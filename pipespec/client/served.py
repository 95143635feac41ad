"""What whoever asks a cluster must know of its model. No checkpoint is read to ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine import tokenizer
from pipespec.engine.grammar import Grammars
from pipespec.engine.tokenizer import LONGEST_REASON, BackendTokenizer, Tokenizer
from pipespec.engine.vocabulary import compare_vocabularies
from pipespec.errors import ModelError, PromptError
from pipespec.system.reading import is_whole

if TYPE_CHECKING:  # `pipespec status` can do without
    from pipespec.cluster.deployment import Deployment
    from pipespec.config.schema import Config


@dataclass(frozen=True)
class ServedModel:
    """The model of a cluster, as its users see it.

    Attributes:
        target: the folder or hub id of the model, where the cluster was started.
        vocab_size: rows of its embedding.
        context: tokens of prompt and answer at most.
        eos: tokens that end a text.
        backend: its tokenizer; None: Transformers must read `target` on the machine that asks.
        time_scale: how many times longer than in the machine that is emulated everything takes;
            None: nothing is emulated.
        synthetic: whether guesses are made from the answer.
    """

    target: str
    vocab_size: int
    context: int
    eos: tuple[int, ...]
    backend: BackendTokenizer | None = field(repr=False)
    time_scale: float | None = None
    synthetic: bool = False

    @classmethod
    def of(cls, deployment: Deployment) -> ServedModel:
        """The model of a cluster that is about to start, whose drafts have the same tokens.

        Raises ModelError.
        """
        found = tokenizer.load(deployment.target.path)
        for _, info in deployment.models[1:]:
            compare_vocabularies(found, tokenizer.load(info.path))
        return cls(
            target=full_name(deployment.config.model.target),
            vocab_size=deployment.target.vocab_size,
            context=deployment.context,
            eos=deployment.target.eos,
            backend=found if isinstance(found, BackendTokenizer) else None,
            time_scale=emulated_scale(deployment.config),
            synthetic=deployment.config.source.synthetic,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelError if this machine has not the model that it must be read from."""
        if self.backend is not None:
            return self.backend
        return tokenizer.load(Path(self.target))

    def grammars(self) -> Grammars:
        """What compiles grammars for its tokens, to see that they can be followed."""
        grammars = Grammars(lambda: self.tokenizer, self.vocab_size, self.eos)
        grammars.warm()
        return grammars

    def encode(self, prompt: str, *, chat: bool = False, bounded: bool = True) -> list[int]:
        """The token ids of a prompt, with `chat` in the model's chat template.

        Raises PromptError, also for one that leaves no room for an answer if `bounded`, and
        ModelError for a template that fails.
        """
        if not prompt:
            raise PromptError("The prompt is empty; pass --prompt TEXT or --prompt-file FILE.")
        ids = self.tokenizer.encode(
            self._as_chat(prompt) if chat else prompt, add_special_tokens=not chat
        )
        if not ids:
            raise PromptError("The prompt has no tokens; pass a longer one.")
        if bounded and len(ids) >= self.context:
            raise PromptError(
                f"The prompt has {len(ids)} tokens, but the context holds {self.context} and needs "
                "room for an answer; shorten the prompt or raise model.context."
            )
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answering: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a conversation, with `answering` up to where the model's answer begins.

        `tools` are functions that it may call, as Transformers gives them to templates. Raises
        TemplateFailed, also if the model has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise TemplateFailed("there is none")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=answering,
                tokenize=False,
            )
        except Exception as error:  # noqa: BLE001 - a template is a program of somebody else's
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_REASON]
            raise TemplateFailed(why) from None
        if not isinstance(text, str) or not is_whole(text):
            raise TemplateFailed("what it makes is no text")
        return text

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


class TemplateFailed(Exception):
    """Why a chat template made no text, as a clause."""


def emulated_scale(config: Config) -> float | None:
    """How many times longer than in the emulated machine or network everything takes here;
    None: nothing is emulated."""
    return config.pace.scale if config.pace or config.link else None


def full_name(target: str) -> str:
    """A model that was set by `target`: the whole path of its folder or file, or its id on the
    hub."""
    return str(Path(target).absolute() if Path(target).exists() else target)
