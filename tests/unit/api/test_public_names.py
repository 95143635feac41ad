"""What `import pipespec` offers, and what it costs."""

import inspect
import subprocess
import sys
from dataclasses import fields

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
FIELDS: dict[type, str] = {
    pipespec.SamplingParams: "n max_tokens min_tokens temperature top_p top_k min_p seed stop "
    "stop_token_ids ignore_eos presence_penalty frequency_penalty repetition_penalty logit_bias "
    "logprobs prompt_logprobs structured_outputs priority acceptance",
    pipespec.StructuredOutputsParams: "json regex choice grammar",
    pipespec.RequestOutput: "request_id prompt prompt_token_ids prompt_logprobs outputs",
    pipespec.CompletionOutput: "index text token_ids cumulative_logprob logprobs finish_reason "
    "metrics",
    pipespec.Logprob: "logprob rank decoded_token",
}
SLOW = {"asyncio", "fastapi", "hydra", "numpy", "redis", "torch", "transformers"}


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
    for kind, names in FIELDS.items():
        assert [field.name for field in fields(kind)] == names.split()
    # All that a request's tokens depend on can be chosen.
    chosen = {field.name for field in fields(pipespec.SamplingParams)}
    assert {field.name for field in fields(RequestParams)} - chosen == {"grammar"}
    assert public(pipespec.RequestOutput) == ["finish_reason", "metrics", "text", "token_ids"]


def imports(statement: str) -> set[str]:
    """The slow packages that are imported after a statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return SLOW & set(done.stdout.split())


def test_importing_the_package_or_the_interface_imports_nothing_slow() -> None:
    assert imports("import pipespec") == set()
    found = imports("from pipespec import LLM, AsyncLLM, SamplingParams")
    assert found & {"fastapi", "torch", "transformers"} == set()
