"""Lossless speculative decoding of one large language model, pipelined over several hosts.

    from pipespec import LLM, SamplingParams

    with LLM() as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)

Its names are imported when they are used: `import pipespec` costs nothing.
"""

import sys
from typing import TYPE_CHECKING, Any

# Python looks in the working folder first for what a module run by `-m` imports. There it should
# come last: a user's `select.py` or `queue.py` is not Python's own.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))

if TYPE_CHECKING:
    from pipespec.api.async_llm import AsyncLLM as AsyncLLM
    from pipespec.api.llm import LLM as LLM
    from pipespec.api.outputs import CompletionOutput as CompletionOutput
    from pipespec.api.outputs import Logprob as Logprob
    from pipespec.api.outputs import RequestOutput as RequestOutput
    from pipespec.api.sampling_params import SamplingParams as SamplingParams
    from pipespec.api.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from pipespec.errors import PipespecError as PipespecError

_MODULES = {
    "LLM": "pipespec.api.llm",
    "AsyncLLM": "pipespec.api.async_llm",
    "SamplingParams": "pipespec.api.sampling_params",
    "StructuredOutputsParams": "pipespec.api.sampling_params",
    "RequestOutput": "pipespec.api.outputs",
    "CompletionOutput": "pipespec.api.outputs",
    "Logprob": "pipespec.api.outputs",
    "PipespecError": "pipespec.errors",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pipespec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
