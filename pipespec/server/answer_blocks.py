"""One answer as every dialect's replies have it: blocks of reasoning, text and calls, as they
arrive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from pipespec.server.reasoning import ReasoningUse, SplitDelta, Thought
from pipespec.server.tool_parsers.tool_choice import ToolUse
from pipespec.server.tool_parsers.tool_parser import CallDelta

BlockKind = Literal["reasoning", "text", "call"]
# The key under which arguments are reported that are no JSON object, as the model wrote them.
UNREADABLE = "unreadable_arguments"


@dataclass
class Block:
    """Part of an answer. `number` counts the blocks of this kind; `id` and `name` are those of a
    call."""

    kind: BlockKind
    number: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class BlockDelta:
    """What is new in the block `index` of an answer; the first delta of a call has no text. A block
    ends where the next one begins, and at the end of the answer."""

    index: int
    block: Block
    text: str
    begins: bool


class AnswerBlocks:
    """Splits one answer into blocks as it arrives, and never takes back what it has returned."""

    def __init__(self, tool_use: ToolUse | None, reasoning: ReasoningUse | None = None):
        self.blocks: list[Block] = []
        self.keeps = True  # whether blocks keep their texts, beside those of calls
        self._tool_use = tool_use
        self._parser = tool_use.parser(tool_use.strings) if tool_use else None
        self._splitter = reasoning.splitter(calls=tool_use is not None) if reasoning else None

    def push(self, text: str, *, last: bool = False) -> list[BlockDelta]:
        """What the next text makes certain; `last`: no text follows."""
        if self._parser is None and self._splitter is None:  # nearly always
            return [self._add("text", text)] if text else []
        return [*self._deltas(text, last)]

    def text_of(self, kind: BlockKind) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def thinking(self) -> bool:
        return bool(self.blocks) and self.blocks[-1].kind == "reasoning"

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    def message(self) -> dict[str, Any]:
        """The answer as a message of a later chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text_of("text")}
        if thought := self.text_of("reasoning"):
            message["reasoning_content"] = thought
        if calls := self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(arguments_of(call), ensure_ascii=False),
                    },
                }
                for call in calls
            ]
        return message

    def _deltas(self, text: str, last: bool) -> Iterator[BlockDelta]:
        for part in self._split(text, last):
            if isinstance(part, Thought):
                yield self._add("reasoning", part.text)
            elif isinstance(part, str):
                yield self._add("text", part)
            elif self._tool_use is None or self._tool_use.parallel or part.index == 0:
                yield self._add_call(part)

    def _split(self, text: str, last: bool) -> list[SplitDelta]:
        split: list[SplitDelta] = [text] if text else []
        if self._splitter is not None:
            split = self._splitter.push(text) + (self._splitter.finish() if last else [])
        if self._parser is None:
            return split
        parsed: list[SplitDelta] = []
        for part in split:
            parsed += self._parser.push(part) if isinstance(part, str) else [part]
        return parsed + (self._parser.finish() if last else [])

    def _add_call(self, part: CallDelta) -> BlockDelta:
        if part.name is None:
            return self._add("call", part.arguments)
        assert self._tool_use is not None, "only a parser finds calls"
        number = len(self.calls)
        id_ = self._tool_use.family.new_id(part.name, number)
        return self._begin(Block("call", number, id_, part.name), "")

    def _add(self, kind: BlockKind, text: str) -> BlockDelta:
        if self.blocks and self.blocks[-1].kind == kind:
            block = self.blocks[-1]
            if self.keeps or kind == "call":
                block.pieces.append(text)
            return BlockDelta(len(self.blocks) - 1, block, text, begins=False)
        return self._begin(Block(kind, sum(b.kind == kind for b in self.blocks)), text)

    def _begin(self, block: Block, text: str) -> BlockDelta:
        if text and self.keeps:
            block.pieces.append(text)
        self.blocks.append(block)
        return BlockDelta(len(self.blocks) - 1, block, text, begins=True)


def arguments_of(call: Block) -> dict[str, Any]:
    """The arguments of a call as an object: as far as they came, if the answer was cut, and the
    model's own text under one key if they are no JSON object."""
    try:
        found = from_json(call.text or "{}", allow_partial="trailing-strings")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {UNREADABLE: call.text}
