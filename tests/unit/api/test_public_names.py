"""What `import pipespec` offers, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from time import perf_counter

import pytest

import pipespec
from pipespec.core import SamplingParams as RequestParams

NAMES = [
    "AsyncLLM",
    "CompletionOutput",
    "LLM",
    "Logprob",
    "PipespecError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
# What both LLM and AsyncLLM have.
METHODS = ["chat", "close", "connect", "generate", "model_info", "stream", "stream_chat"]
SLOW = {"asyncio", "fastapi", "hydra", "numpy", "redis", "torch", "transformers"}
IMPORT_S = 0.1


def public(kind: type) -> list[str]:
    return sorted(name for name in vars(kind) if not name.startswith("_"))


def test_the_public_names_are_these() -> None:
    assert sorted(pipespec.__all__) == NAMES
    assert set(NAMES) <= set(dir(pipespec))
    for name in NAMES:
        assert getattr(pipespec, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        _ = pipespec.LMM


def test_both_interfaces_have_the_same_methods_and_arguments() -> None:
    assert public(pipespec.LLM) == METHODS
    assert public(pipespec.AsyncLLM) == sorted([*METHODS, "start"])
    for name in ("__init__", "generate", "chat", "stream", "stream_chat", "connect"):
        own, other = (
            list(inspect.signature(getattr(kind, name)).parameters)
            for kind in (pipespec.LLM, pipespec.AsyncLLM)
        )
        assert own == other


def test_the_fields_of_parameters_and_outputs_are_these() -> None:
    assert [field.name for field in fields(pipespec.SamplingParams)] == [
        "n",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "structured_outputs",
        "priority",
        "acceptance",
    ]
    # All that a request's tokens depend on can be chosen.
    chosen = {field.name for field in fields(pipespec.SamplingParams)}
    assert {field.name for field in fields(RequestParams)} - chosen == {"grammar"}
    assert [field.name for field in fields(pipespec.StructuredOutputsParams)] == [
        "json",
        "regex",
        "choice",
        "grammar",
    ]
    assert [field.name for field in fields(pipespec.RequestOutput)] == [
        "request_id",
        "prompt",
        "prompt_token_ids",
        "prompt_logprobs",
        "outputs",
    ]
    assert public(pipespec.RequestOutput) == ["finish_reason", "metrics", "text", "token_ids"]
    assert [field.name for field in fields(pipespec.CompletionOutput)] == [
        "index",
        "text",
        "token_ids",
        "cumulative_logprob",
        "logprobs",
        "finish_reason",
        "metrics",
    ]
    assert [field.name for field in fields(pipespec.Logprob)] == [
        "logprob",
        "rank",
        "decoded_token",
    ]


def imports(statement: str) -> set[str]:
    """The slow packages that are imported after a statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return SLOW & set(done.stdout.split())


def test_importing_the_package_imports_nothing_slow() -> None:
    assert imports("import pipespec") == set()


def test_importing_the_interface_imports_neither_torch_nor_transformers() -> None:
    found = imports("from pipespec import LLM, AsyncLLM, SamplingParams")
    assert found & {"fastapi", "torch", "transformers"} == set()


def test_importing_the_package_is_quick() -> None:
    """As the interpreter measures it, the best of some tries: the machine may be busy."""
    script = "from time import perf_counter as t; s = t(); import pipespec; print(t() - s)"
    took = []
    for _ in range(5):
        began = perf_counter()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        took.append(float(done.stdout))
        assert took[-1] <= perf_counter() - began
    assert min(took) <= IMPORT_S
