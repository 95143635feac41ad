"""What a model thinks before its answer: whether and how it marks that, and parsers which divide an
answer into thoughts, text and calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipespec.engine.llguidance_backend import grammar_after
from pipespec.server.tool_parsers.tool_parser import BlockKind, Piece
from pipespec.text import Tokenizer, special_markers


def held_back(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of a text that may begin one of the markers."""
    longest = min(len(text), max(map(len, markers)) - 1)
    ends = range(longest, 0, -1)
    return next((n for n in ends if any(m.startswith(text[-n:]) for m in markers)), 0)


class Tagged:
    """`<think>...</think>` and then the answer, without white space around the reasoning. An answer
    that does not begin with the opening tag is held for `ReasoningUse.hold` characters, as a
    closing tag among them ends reasoning too."""

    def __init__(self, use: ReasoningUse):
        self._opening, self._closing = TAGS[use.family]
        self._tags = re.compile("|".join(map(re.escape, TAGS[use.family])))
        self._hold, self._thinks = use.hold, use.thinks
        self._inside = use.begun
        self._before = not use.begun  # whether the opening tag may still come
        self._searched = 0  # characters of an answer that does not begin with it
        self._held = ""  # what may belong to a tag, or is blank at an edge
        self._trims = use.begun and not use.amid  # whether blanks that come next are left out

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if self._before and not self._find_opening():
            return []
        if self._inside:
            return self._push_thought()
        return self._push_text()

    def finish(self) -> list[Piece]:
        rest, self._held = self._held, ""
        if self._inside:
            thought = rest.rstrip()
            return [Piece("reasoning", thought)] if thought else []
        return [Piece("text", rest)] if rest and not self._trims else []

    def _find_opening(self) -> bool:
        """Whether it is known if the answer begins with reasoning."""
        begins = "" if self._searched else self._held.lstrip()
        if begins.startswith(self._opening):
            self._held = begins[len(self._opening) :]
            self._inside = self._trims = True
        elif not self._searched and self._opening.startswith(begins):
            return False
        elif self._hold != 0:
            longest = max(len(self._opening), len(self._closing))
            begin, end = max(0, self._searched - longest), self._hold or len(self._held)
            tag = self._tags.search(self._held, begin, end)
            self._searched = len(self._held)
            if tag is None and (self._hold is None or self._searched <= self._hold):
                return False
            self._inside = self._trims = tag[0] == self._closing if tag else self._thinks
        self._before = False
        return True

    def _push_thought(self) -> list[Piece]:
        self._trim()
        thought, tag, rest = self._held.partition(self._closing)
        if tag:
            self._inside, self._trims, self._held = False, True, rest
            shown = thought.rstrip()
            return [*([Piece("reasoning", shown)] if shown else []), *self._push_text()]
        certain = thought[: len(thought) - held_back(thought, (self._closing,))].rstrip()
        self._held = thought[len(certain) :]
        return [Piece("reasoning", certain)] if certain else []

    def _push_text(self) -> list[Piece]:
        self._trim()
        text, self._held = self._held, ""
        return [Piece("text", text)] if text else []

    def _trim(self) -> None:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held


START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
SPECIAL = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_MARKER = re.compile("|".join(map(re.escape, SPECIAL)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w-]+)")


def open_channel(prompt: str) -> str | None:
    """The channel of the message within whose text a prompt ends; None: it ends in none."""
    if MESSAGE not in prompt or _MARKER.search(prompt, prompt.rindex(MESSAGE) + len(MESSAGE)):
        return None
    channel = _CHANNEL.search(prompt, max(0, prompt.rfind(START)))
    return channel[1] if channel else ""


class Harmony:
    """`<|channel|>analysis<|message|>...<|end|>` and so on: the channel analysis is reasoning, what
    is for a function a call, all else text.

    With `calls` False a call is text, as no tool was offered.
    """

    def __init__(self, use: ReasoningUse, calls: bool):
        self._calls = calls
        self._held = ""
        # Of the message that begins; None: its text has begun.
        self._header: str | None = None if use.begun else ""
        self._in_messages = use.begun
        self._kind: BlockKind = "reasoning" if use.amid else "text"

    def push(self, text: str) -> list[Piece]:
        self._held += text
        made: list[Piece] = []
        while found := _MARKER.search(self._held):
            made += self._text(self._held[: found.start()])
            self._held = self._held[found.end() :]
            made += self._marker(found[0])
        certain = len(self._held) - held_back(self._held, SPECIAL)
        made += self._text(self._held[:certain])
        self._held = self._held[certain:]
        return made

    def finish(self) -> list[Piece]:
        made = self._text(self._held)
        self._held = ""
        return made + self._without_messages()

    def _text(self, text: str) -> list[Piece]:
        if self._header is not None:
            self._header += text
            return []
        return [Piece(self._kind, text)] if text else []

    def _without_messages(self) -> list[Piece]:
        """The text of an answer that ends without ever having begun a message."""
        text, self._header = self._header, ""
        return [Piece("text", text)] if text and not self._in_messages else []

    def _marker(self, marker: str) -> list[Piece]:
        if marker in ENDS:
            made, self._in_messages = self._without_messages(), True
            return made
        self._in_messages = True
        if marker == START:
            self._header = ""
            return []
        if marker != MESSAGE or self._header is None:
            self._header = (self._header or "") + marker
            return []
        channel, function = _CHANNEL.search(self._header), _FUNCTION.search(self._header)
        self._header = None
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "text"
        if function is None or not self._calls:
            return []
        self._kind = "call"
        return [Piece("call", name=function[1])]


# Characters of a streamed answer without an opening tag that may wait for a closing one: half a
# second at 120 tokens/s.
HOLD = 256
Family = Literal["think", "mistral", "seed", "gpt_oss"]
TAGS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
}


@dataclass(frozen=True)
class ReasoningUse:
    """How the reasoning of an answer is parsed; `begun`: the prompt has its opening tag, or for
    gpt-oss ends within the message that the answer continues; `amid`: it ends amid reasoning.
    An answer without an opening tag is held for `hold` characters (None: to its end) for a closing
    one; behind them all is text, or with `thinks` reasoning."""

    family: Family
    begun: bool = False
    amid: bool = False
    hold: int | None = None
    thinks: bool = False

    def for_stream(self) -> ReasoningUse:
        return self if self.hold is not None else replace(self, hold=HOLD)

    @property
    def special(self) -> tuple[str, ...]:
        return TAGS.get(self.family, SPECIAL)

    def splitter(self, *, calls: bool) -> Tagged | Harmony:
        return Harmony(self, calls) if self.family == "gpt_oss" else Tagged(self)

    def grammar(self, tokenizer: Tokenizer, grammar: str) -> str:
        ids = {text: token for token, text in special_markers(tokenizer, self.special).items()}

        def terminal(text: str) -> str:
            return f"<[{ids[text]}]>" if text in ids else f'"{text}"'

        if self.family == "gpt_oss" and self.begun and not self.amid:
            return grammar
        if self.family == "gpt_oss":  # the messages before the answer's text
            channel, message, start, end = map(terminal, (CHANNEL, MESSAGE, START, ENDS[0]))
            thought = "" if self.amid else f'{channel} "analysis" {message}'
            lines = [
                f'start: thought{"" if self.amid else "?"} {channel} "final" {message} @answer',
                f'thought: {thought} any {end} {start} "assistant"',
                "any: /(.|\\n)*/",
            ]
            return grammar_after("\n".join(lines), grammar)
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


def reasoning_use(template: str, prompt: str, continued: str = "") -> ReasoningUse | None:
    """How the answer to a prompt in a chat template is split, which may continue a text at its end;
    None: it has no reasoning."""
    if CHANNEL in template and "analysis" in template:
        channel = open_channel(prompt)
        return ReasoningUse("gpt_oss", begun=channel is not None, amid=channel == "analysis")
    end = prompt.removesuffix(continued.lstrip()).rstrip()
    families: tuple[Family, ...] = ("think", "mistral", "seed")
    for family in families:
        opening, closing = TAGS[family]
        if not any(tag in text for tag in (opening, closing) for text in (template, continued)):
            continue
        _, opened, thought = continued.rpartition(opening)
        begun = bool(opened) or end.endswith(opening)
        if closing in thought or (not begun and end.endswith(closing)):  # it was switched off
            return None
        # As of models distilled from R1: a template that writes the opening tag nowhere belongs to
        # a model that always thinks, as vLLM's parser of R1 takes it.
        thinks = not (begun or continued.strip()) and opening not in template
        amid = begun and bool(thought.strip())
        return ReasoningUse(family, begun=begun, amid=amid, thinks=thinks)
    return None
