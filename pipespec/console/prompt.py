"""The prompt of a command, from the one place where it was given."""

from __future__ import annotations

from pipespec.console.arguments import STDIN
from pipespec.console.terminal import standard_input
from pipespec.errors import PromptError
from pipespec.system.validation import Unreadable, is_whole, read_text


def read_prompt(text: str | None, file: str | None, *, from_stdin: bool) -> str:
    """The prompt from the one place where it was given. Raises PromptError."""
    if (text is not None) + (file is not None) + from_stdin != 1:
        raise PromptError(
            "Pass the prompt in one way: --prompt TEXT, --prompt-file FILE or - (standard input)."
        )
    if text is None:
        source = "Standard input" if file in (None, STDIN) else f"The file {file!r}"
        try:
            text = standard_input() if file in (None, STDIN) else read_text(file or "", pipe=True)
        except Unreadable as error:
            raise PromptError(f"{source} cannot be read: {error}; pass --prompt TEXT.") from error
    if not text:
        raise PromptError("The prompt is empty; pass at least one character.")
    if not is_whole(text):
        raise PromptError("The prompt is not UTF-8 text; save it as UTF-8 and pass --prompt-file.")
    return text
