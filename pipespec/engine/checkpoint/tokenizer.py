"""A model's tokenizer, as Transformers builds it, without importing Transformers each time.

Transformers builds a tokenizer of the package `tokenizers` from a model's files. It is cached in
the user's cache folder and in the registry entry of a running cluster, which saves clients some
seconds of imports. A tokenizer without such a backend is refused."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn

from pipespec.engine.checkpoint.checkpoint import StoredFiles, open_files
from pipespec.errors import ModelError
from pipespec.system import heap
from pipespec.system.result_cache import cached_call
from pipespec.system.validation import Unreadable, reason


@dataclass(frozen=True)
class BackendTokenizer:
    """A tokenizer of the package `tokenizers`, with a chat template.

    Attributes:
        backend: the tokenizer as JSON.
        chat_template: the model's template, if it has one, or several by name.
        special_tokens: texts of special tokens by name, such as `bos_token`, for the template.
    """

    backend: str = field(repr=False)
    chat_template: str | Mapping[str, str] | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer as Backend

        try:
            found = Backend.from_str(self.backend)
        except Exception as error:
            why = reason(error, named=False)
            raise ModelError(
                f"the cached tokenizer of the model cannot be used ({why}); start the cluster again"
            ) from error
        heap.release()  # what reading it has freed, half of it
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; the text of a special token becomes that token."""
        # Unlike `encode`, this releases the GIL while a long text is encoded.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids. It is not cleaned up, which could change text that was sent already."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        return self._tokenizer.id_to_token(ids)

    def get_vocab(self) -> Mapping[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        chat_template: str,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as one text. Raises whatever the template raises."""
        return _compiled(chat_template).render(
            messages=conversation,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=None,
            **{**self.special_tokens, **variables},
        )


def load(path: Path) -> BackendTokenizer:
    """The tokenizer in a model's folder, or GGUF file. Raises ModelError."""
    files = open_files(path)
    try:
        depends = {
            "files": files.tokenizer_state(),
            "templates": "all",  # of several; earlier checkouts kept one
            "transformers": importlib.metadata.version("transformers"),
            "tokenizers": importlib.metadata.version("tokenizers"),
            "sentencepiece": importlib.metadata.version("sentencepiece"),
        }
    except Unreadable as error:
        raise files.tokenizer_refused(str(error)) from None
    return cached_call("tokenizers", BackendTokenizer, depends, _read, files)


def _read(files: StoredFiles) -> BackendTokenizer:
    """The tokenizer, which has tokens that are not special. Raises ModelError."""
    try:
        tokenizer = files.tokenizer()
    except Exception as error:  # noqa: BLE001 - the tokenizers package raises nothing narrower
        raise files.tokenizer_refused(reason(error, named=False)) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        why = f"{type(tokenizer).__name__} is none of the package tokenizers"
        raise files.tokenizer_refused(why)
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
    if not set(backend.get_vocab()) - {*special.values()}:
        raise files.tokenizer_refused("it has no tokens")
    return BackendTokenizer(backend.to_str(), tokenizer.chat_template, special)


def same_tokens(one: BackendTokenizer, other: BackendTokenizer) -> bool:
    """Whether both give every token the same id. The embeddings may have other numbers of rows."""
    # Most drafts have the very tokenizer, which is not read twice.
    return one.backend == other.backend or one.get_vocab() == other.get_vocab()


@lru_cache(maxsize=4)  # compiling takes longer than rendering
def _compiled(template: str) -> Any:
    """A chat template in the same environment as in Transformers, without its import."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks text that a model is trained on; it does not change the text."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's interface

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
