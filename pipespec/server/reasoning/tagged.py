"""Reasoning between two tags: DeepSeek R1, Qwen 3, GLM 4.5 and others; Mistral's Magistral."""

from __future__ import annotations

from pipespec.server.reasoning.abstract_splitter import SplitDelta, Splitter, Thought, held_back


class Tagged(Splitter):
    """`<think>...</think>` and then the answer. White space around the reasoning is left out.

    Args:
        opening, closing: the tags.
        begun: whether the prompt ends with the opening tag. Otherwise an answer without it has no
            reasoning.
    """

    def __init__(self, opening: str, closing: str, *, begun: bool):
        self._opening, self._closing = opening, closing
        self._inside = begun
        self._before = not begun  # whether the opening tag may still come
        self._held = ""  # what may belong to a tag, or is blank at an edge
        self._trims = begun  # whether blanks that come next are left out

    def push(self, text: str) -> list[SplitDelta]:
        self._held += text
        if self._before and not self._find_opening():
            return []
        if self._inside:
            return self._push_thought()
        return self._push_text()

    def finish(self) -> list[SplitDelta]:
        rest, self._held = self._held, ""
        if self._inside:
            thought = rest.rstrip()
            return [Thought(thought)] if thought else []
        return [rest] if rest and not self._trims else []

    def _find_opening(self) -> bool:
        """Look for the opening tag; whether it is known if it is there."""
        begins = self._held.lstrip()
        if begins.startswith(self._opening):
            self._held = begins[len(self._opening) :]
            self._inside = self._trims = True
        elif self._opening.startswith(begins):
            return False
        self._before = False
        return True

    def _push_thought(self) -> list[SplitDelta]:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        thought, tag, rest = self._held.partition(self._closing)
        if tag:
            self._inside, self._trims, self._held = False, True, rest
            shown = thought.rstrip()
            return [*([Thought(shown)] if shown else []), *self._push_text()]
        certain = thought[: len(thought) - held_back(thought, (self._closing,))].rstrip()
        self._held = thought[len(certain) :]
        return [Thought(certain)] if certain else []

    def _push_text(self) -> list[SplitDelta]:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        text, self._held = self._held, ""
        return [text] if text else []
