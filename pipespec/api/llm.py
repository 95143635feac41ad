"""`LLM`: `AsyncLLM` for callers that block, as in scripts and notebooks."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Self

from pipespec.api.async_llm import AsyncLLM
from pipespec.api.outputs import RequestOutput
from pipespec.api.prompts import Conversation, Message, Prompt
from pipespec.api.sampling_params import Sampling, SamplingParams
from pipespec.client.model_info import ModelInfo
from pipespec.client.sync_client import LoopThread
from pipespec.errors import PipespecError
from pipespec.head.policies.policy import SpeculationPolicy


class LLM:
    """Generates texts with a model on a cluster of this process.

        with LLM("org/model", draft="org/draft", stages=4) as llm:
            for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
                print(output.text)

    The arguments are those of `AsyncLLM`. The constructor returns when all ranks have loaded. It
    works in any thread, beside a running event loop, in notebooks, and in scripts without a
    `__main__` guard; it installs no signal handler. Ctrl-C cancels the requests of the call that it
    interrupts, and the cluster stays usable. `close`, the end of the `with` block, garbage
    collection and the end of the interpreter end the cluster. Several threads may call it at once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        draft: str | os.PathLike[str] | None = None,
        stages: int | None = None,
        hosts: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        policy: SpeculationPolicy | None = None,
    ):
        self._open(
            AsyncLLM(
                model, draft=draft, stages=stages, hosts=hosts, settings=settings, policy=policy
            )
        )

    @classmethod
    def connect(cls, name: str | None = None) -> LLM:
        """As `AsyncLLM.connect`; closing it leaves the cluster up. Raises Unreachable too."""
        llm = cls.__new__(cls)
        llm._open(AsyncLLM.connect(name))
        return llm

    def _open(self, llm: AsyncLLM) -> None:
        self._thread = LoopThread(llm)
        self._close = weakref.finalize(self, self._thread.close)

    def close(self) -> None:
        """Cancel what is under way and end the cluster, if it is of this process; harmless when
        called again."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None
    ) -> list[RequestOutput]:
        """As `AsyncLLM.generate`."""
        return self._thread.run(self._opened.generate(prompts, sampling_params))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Sampling = None,
    ) -> list[RequestOutput]:
        """As `AsyncLLM.chat`."""
        return self._thread.run(self._opened.chat(messages, sampling_params))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """As `AsyncLLM.stream`; leaving the loop cancels the request."""
        return self._iterate(self._opened.stream(prompt, sampling_params))

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """As `AsyncLLM.stream_chat`."""
        return self._iterate(self._opened.stream_chat(messages, sampling_params))

    @property
    def model_info(self) -> ModelInfo:
        """The model: its tokenizer, context and end tokens."""
        return self._opened.model_info

    def _iterate(self, pieces: AsyncGenerator[str]) -> Iterator[str]:
        yield from self._thread.iterate(pieces)  # `self` is needed for as long

    @property
    def _opened(self) -> AsyncLLM:
        if not self._close.alive:
            raise PipespecError("The LLM is closed; make a new one.")
        return self._thread.resource
