"""A rank whose allocation fails ends one request; the texts of all others do not change."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipespec.controller.log_records import failure_of
from pipespec.core import NO_MEMORY, SamplingParams
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.errors import RankFailed
from tests.helpers import models
from tools.rig import cluster

NEW_TOKENS = 12
LONG = tuple(range(2, 62))  # its prompt fills a batch
# Shares the beginning of the long prompt, and needs little memory.
CHILD = (*LONG[:24], 9, 9)
SHORT = [(3, 1, 4, 1, 5, 9, 2, 6), (8, 2, 8, 1, 8), CHILD]
DRAWN = SamplingParams(temperature=0.9, seed=7, prompt_logprobs=1)
SETTINGS = {
    "root": ("policy=root", "cluster.stages=2"),
    "best_first": ("policy.width=8", "cluster.stages=3"),
}


def of_torch() -> None:
    torch.empty(1 << 50)


def of_numpy() -> None:
    np.empty(1 << 50)


def fail_above(
    monkeypatch, name: str, rows: int, where: Callable[[ModelSlice], bool], fail
) -> None:
    """Let this method of slices fail for more than so many rows, once their rank is connected."""
    real, connect = getattr(ModelSlice, name), cluster.connect_links
    connected, head_connected = set[int](), threading.Event()

    def method(self: ModelSlice, inputs: torch.Tensor, *rest: Any) -> Any:
        # The draft works in a thread of its own.
        own = head_connected.is_set() if is_draft(self) else threading.get_ident() in connected
        if own and len(inputs) > rows and where(self):
            fail()
        return real(self, inputs, *rest)

    def connect_links(deployment: Any, where: Any, rank: int, store: Any) -> Any:
        connected.add(threading.get_ident())
        if rank == 0:
            head_connected.set()
        return connect(deployment, where, rank, store)

    monkeypatch.setattr(cluster, "connect_links", connect_links)
    monkeypatch.setattr(ModelSlice, name, method)


def is_draft(model: ModelSlice) -> bool:
    return model.num_layers == 1


@pytest.fixture
def folders(tmp_path):
    target = models.build("llama", tmp_path / "target")
    return target, models.build("llama", tmp_path / "draft", num_hidden_layers=1)


def decoded(folders, redis, prompts, *settings: str, **of_last: Any):
    """Finish reasons and tokens of greedy answers; fields of the last request may be others."""
    requests = [{"prompt": each, "max_new_tokens": NEW_TOKENS} for each in prompts]
    requests[-1] |= of_last
    answers = cluster.decode(cluster.make_deployment(*folders, *settings), redis, requests)
    return [reason for _, reason, _ in answers], [tokens for tokens, *_ in answers]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("rank", "fail"), [("first", of_torch), ("last", of_numpy)], ids=["first", "last"]
)
def test_request_for_whose_rows_a_rank_has_no_memory_fails_alone(
    folders, redis, monkeypatch, caplog, settings, rank, fail
):
    prompts = [SHORT[0], LONG, *SHORT[1:], LONG]
    expected = cluster.reference(folders[0], prompts, NEW_TOKENS)

    def is_rank(model: ModelSlice) -> bool:
        return not is_draft(model) and (model.is_first if rank == "first" else model.is_last)

    # The first chunk of the long prompt. The last request shares what its child has read again.
    fail_above(monkeypatch, "forward", 44, is_rank, fail)
    chunk = "decode.prefill_chunk=48"
    reasons, tokens = decoded(folders, redis, prompts, *SETTINGS[settings], chunk)
    assert reasons == ["length", NO_MEMORY, "length", "length", "length"]
    expected[1] = []
    assert tokens == expected
    assert isinstance(failure_of(NO_MEMORY), RankFailed)
    assert "no memory for a batch" in caplog.text


def test_request_for_whose_logits_there_is_no_memory_fails_alone(folders, redis, monkeypatch):
    expected = cluster.reference(folders[0], SHORT, NEW_TOKENS)
    fail_above(monkeypatch, "logits", 30, lambda model: not is_draft(model), of_torch)
    settings = "cluster.stages=2", "policy.width=8"
    reasons, tokens = decoded(folders, redis, [*SHORT, LONG], *settings, sampling=DRAWN)
    assert reasons == ["length"] * 3 + [NO_MEMORY]
    assert tokens[:3] == expected


@pytest.mark.parametrize("rows", [1, 20], ids=["one row", "short prompts"])
def test_draft_without_memory_changes_no_text(folders, redis, monkeypatch, rows):
    prompts = [*SHORT, LONG]
    expected = cluster.reference(folders[0], prompts, NEW_TOKENS)
    fail_above(monkeypatch, "forward", rows, is_draft, of_torch)
    found = decoded(folders, redis, prompts, "cluster.stages=2", "policy.width=8")
    assert found == (["length"] * 4, expected)
