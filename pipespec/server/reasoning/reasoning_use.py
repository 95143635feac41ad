"""Whether and how a model marks what it thinks, by its chat template and the end of the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipespec.engine.llguidance_backend import grammar_after
from pipespec.server.reasoning import harmony
from pipespec.server.reasoning.abstract_splitter import Splitter
from pipespec.server.reasoning.harmony import Harmony
from pipespec.server.reasoning.tagged import Tagged
from pipespec.text import Tokenizer, special_markers

Family = Literal["think", "mistral", "seed", "gpt_oss"]
TAGS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
}


@dataclass(frozen=True)
class ReasoningUse:
    """How the reasoning of an answer is parsed; `begun`: the prompt has its opening tag, or for
    gpt-oss ends within the message that the answer continues."""

    family: Family
    begun: bool = False

    @property
    def special(self) -> tuple[str, ...]:
        """Texts of the format that are special tokens in some vocabularies."""
        return TAGS.get(self.family, harmony.SPECIAL)

    def splitter(self, *, calls: bool) -> Splitter:
        """The splitter of one answer; `calls`: tools may be called."""
        if self.family == "gpt_oss":
            return Harmony(calls=calls, begun=self.begun)
        opening, closing = TAGS[self.family]
        return Tagged(opening, closing, begun=self.begun)

    def grammar(self, tokenizer: Tokenizer, grammar: str) -> str:
        """The grammar of an answer that begins after the reasoning."""
        ids = {text: token for token, text in special_markers(tokenizer, self.special).items()}

        def terminal(text: str) -> str:
            """A tag in Lark's notation."""
            return f"<[{ids[text]}]>" if text in ids else f'"{text}"'

        if self.family == "gpt_oss" and self.begun:
            return grammar
        if self.family == "gpt_oss":
            return grammar_after(
                _harmony_prefix({text: terminal(text) for text in self.special}), grammar
            )
        opening, closing = TAGS[self.family]
        lines = ["blank: /[ \\t\\r\\n]*/"]
        if closing in ids:
            lines += [f"thought: any {terminal(closing)} blank", "any: /(.|\\n)*/"]
        else:  # the first closing tag ends it
            pattern = closing.replace("/", "\\/").replace("[", "\\[").replace("]", "\\]")
            lines += ["thought: tagged blank", f"tagged[lazy]: /(.|\\n)*{pattern}/"]
        if self.begun:
            lines.insert(0, "start: thought @answer")
        else:
            lines.insert(0, "start: reasoning? @answer")
            lines.append(f"reasoning: {terminal(opening)} thought")
        return grammar_after("\n".join(lines), grammar)


def _harmony_prefix(marks: Mapping[str, str]) -> str:
    """The messages before the answer's text, in Lark's notation."""
    channel, message = marks[harmony.CHANNEL], marks[harmony.MESSAGE]
    end, start = marks["<|end|>"], marks[harmony.START]
    return "\n".join(
        (
            f'start: thought? {channel} "final" {message} @answer',
            f'thought: {channel} "analysis" {message} any {end} {start} "assistant"',
            "any: /(.|\\n)*/",
        )
    )


def reasoning_use(template: str, prompt: str) -> ReasoningUse | None:
    """How the answer to a prompt in a chat template is split; None: it has no reasoning."""
    if harmony.CHANNEL in template and "analysis" in template:
        return ReasoningUse("gpt_oss", begun=harmony.continues_message(prompt))
    end = prompt.rstrip()
    families: tuple[Family, ...] = ("think", "mistral", "seed")
    for family in families:
        opening, closing = TAGS[family]
        if closing in template or opening in template:
            if end.endswith(closing):  # it was switched off
                return None
            return ReasoningUse(family, begun=end.endswith(opening))
    return None
