"""Whole steps on a pretended GPU: what the host waits for, and what fails on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pipespec.core import Request, SamplingParams
from pipespec.engine.attention.select import SDPA, STATIC, TRITON
from pipespec.engine.autotune import autotune
from pipespec.engine.model_slice import ModelSlice
from pipespec.sampling.lossy_acceptance import relaxed, strict
from tests.helpers import models
from tests.helpers.pretended_gpu.allowed import ALLOWED, refused
from tests.helpers.pretended_gpu.findings import Kind
from tests.helpers.pretended_gpu.gpu import AMPERE, PretendedGpu
from tests.helpers.pretended_gpu.pipeline import GRAPHS, ROWS, answers, load, use

ATTENTIONS = (STATIC, GRAPHS, TRITON)
GREEDY = Request(1, (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), 3)
SAMPLED = Request(2, (7, 1, 4), 3, sampling=SamplingParams(temperature=0.8, seed=1))
EVERY_SETTING = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((3, 1.0), (5, -2.0)),
    seed=3,
    logprobs=2,
    prompt_logprobs=1,
    min_tokens=2,
)
# Together they have what attention, positions, mixtures and running states have.
SLICES = (range(models.NUM_LAYERS), range(2), range(2, models.NUM_LAYERS))
# Transformers' own code waits in them (`allowed.LIBRARIES`).
NOT_CAPTURED = ("jetmoe", "longcat_flash", "phimoe")
COVERING = ("gemma2", "gpt_oss")


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as found:
        yield found


def test_answers_are_those_of_a_cpu_whatever_requests_set(gpu: PretendedGpu):
    folder = models.shared("llama")
    requests = [
        GREEDY,
        Request(2, (7, 1, 4), 5, eos=(11,), sampling=EVERY_SETTING),
        Request(3, (7, 1, 4, 8, 8), 5, sampling=SamplingParams(temperature=1.0, seed=2)),
    ]
    found = []
    for device in ("cuda", "cpu"):
        draft, *stages = (load(folder, layers, device) for layers in SLICES)
        for attention in (SDPA, STATIC):
            for model in (draft, *stages):
                use(model, attention, gpu)
            gpu.take()
            found.append(answers(draft, stages, requests))
            assert refused(gpu.take()) == []
    assert found[:2] == found[2:]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in COVERING else pytest.mark.long)
        for name in models.CONFIGS
    ],
)
def test_a_step_waits_for_what_it_needs_alone(gpu: PretendedGpu, name: str):
    target, draft = (load(models.shared(name), range(models.NUM_LAYERS), "cuda") for _ in range(2))
    assert [str(each) for each in gpu.take() if each.kind is Kind.MIXED] == []
    found = []
    captured = name not in NOT_CAPTURED
    for attention in ATTENTIONS:
        use(target, attention, gpu)
        if attention != GRAPHS:
            use(draft, attention, gpu)
        assert target.graph_rows == ((ROWS,) if attention == GRAPHS and captured else ())
        gpu.take()
        found.append(answers(draft, [target], [GREEDY, SAMPLED]))
        assert refused(gpu.take()) == [], attention
    assert found[0] == found[1] == found[2]


def test_a_slice_tunes_itself(gpu: PretendedGpu):
    model = load(models.shared("llama"), range(2), "cuda")
    autotune(model, [ROWS], lambda tuned, rows: tuned.capture_graphs(rows, gpu.capture))
    assert model.refused == []
    assert model.step_ms is not None
    assert [str(each) for each in gpu.take() if each.kind in (Kind.MIXED, Kind.CAPTURE)] == []


def test_lossy_rules_wait_once(gpu: PretendedGpu):
    scores = torch.tensor([0.5, -torch.inf, 3.0, 1.0], dtype=torch.float64)
    on_gpu = scores.to("cuda")
    gpu.take()
    assert relaxed(on_gpu, [0, 1], (3, 9)) == relaxed(scores, [0, 1], (3, 9)) == 3
    assert strict(on_gpu, {0: -1.0, 1: -0.1}, (3,)) == strict(scores, {0: -1.0, 1: -0.1}, (3,)) == 3
    assert relaxed(on_gpu, [1], ()) is None
    found = gpu.take()
    assert len(found) == 3
    assert refused(found) == []


def test_mixture_on_an_older_gpu_is_computed_without_a_graph():
    with PretendedGpu(AMPERE) as gpu:
        model = load(models.shared("qwen3_moe"), range(1), "cuda")
        use(model, GRAPHS, gpu)
        (sentence,) = model.refused
        assert sentence.startswith("Batches of up to 16 rows are computed without a graph: ")
        assert "_grouped_mm" in sentence
        gpu.take()
        model.forward(*model.example_batch(4))
        found = gpu.take()
        assert any("_grouped_mm" in each.operation for each in found)
        assert refused(found) == []


# --- faults that are planted ------------------------------------------------------------------


def item(hidden: Tensor) -> None:
    hidden.sum().item()


def branch(hidden: Tensor) -> None:
    assert hidden.isfinite().all()


def to_list(hidden: Tensor) -> None:
    hidden[0].tolist()


def nonzero(hidden: Tensor) -> None:
    (hidden > 0).nonzero()


def boolean_index(hidden: Tensor) -> None:
    hidden[hidden > 0]


def repeated(hidden: Tensor) -> None:
    hidden[0].repeat_interleave((hidden[0] > 0).sum(-1), 0)


def list_index(hidden: Tensor) -> None:
    hidden[..., [0, 2]]


def index_in_main_memory(hidden: Tensor) -> None:
    hidden[..., torch.tensor([0, 2])]


def stored_at_index(hidden: Tensor) -> None:
    hidden[..., np.array([0, 2])] = 1.0


def mixed(hidden: Tensor) -> None:
    hidden + torch.ones(hidden.shape[-1])


def mixed_index(hidden: Tensor) -> None:
    hidden.index_select(-1, torch.tensor([0, 2]))


def unpinned(hidden: Tensor) -> None:
    torch.ones(3).to(hidden.device, non_blocking=True)


def unpinned_store(hidden: Tensor) -> None:
    hidden[0, 0].copy_(torch.ones(hidden.shape[-1]), non_blocking=True)


def numbers(hidden: Tensor) -> None:
    torch.tensor([1.0, 2.0], device=hidden.device)


def array(hidden: Tensor) -> None:
    torch.as_tensor(np.ones(2), device=hidden.device)


def blocking(hidden: Tensor) -> None:
    torch.ones(3).pin_memory().to(hidden.device)


def download(hidden: Tensor) -> None:
    hidden.cpu()


def unpinned_download(hidden: Tensor) -> None:
    hidden.to("cpu", non_blocking=True)


def synchronized(hidden: Tensor) -> None:
    torch.cuda.synchronize(hidden.device)


FAULTS: list[tuple[Callable[[Tensor], None], Kind]] = [
    (item, Kind.READ),
    (branch, Kind.READ),
    (to_list, Kind.READ),
    (nonzero, Kind.SIZE),
    (boolean_index, Kind.SIZE),
    (repeated, Kind.SIZE),
    (list_index, Kind.INDEX),
    (index_in_main_memory, Kind.INDEX),
    (stored_at_index, Kind.INDEX),
    (mixed, Kind.MIXED),
    (mixed_index, Kind.MIXED),
    (unpinned, Kind.UNPINNED),
    (unpinned_store, Kind.UNPINNED),
    (numbers, Kind.UNPINNED),
    (array, Kind.UNPINNED),
    (blocking, Kind.BLOCKING),
    (download, Kind.READ),
    (unpinned_download, Kind.UNPINNED),
    (synchronized, Kind.WAIT),
]


@pytest.fixture(scope="module")
def llama() -> ModelSlice:
    with PretendedGpu() as gpu:
        model = load(models.shared("llama"), range(2), "cuda")
        use(model, STATIC, gpu)
    return model


@pytest.fixture
def plant(llama: ModelSlice) -> Iterator[Callable[[Callable[[Tensor], None]], None]]:
    """Lets a layer of the slice call a function with its hidden states, `[1, rows, hidden]`."""
    hooks = []

    def planted(fault: Callable[[Tensor], None]) -> None:
        def call(_: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            fault(args[0])

        hooks.append(llama._base.layers[1].mlp.register_forward_pre_hook(call))

    yield planted
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("fault", "kind"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_planted_fault_is_found_with_its_line(gpu, llama, plant, fault, kind):
    plant(fault)
    llama.forward(*llama.example_batch(4))
    (found,) = [each for each in gpu.take() if each.place not in ALLOWED]
    assert found.kind is kind
    assert found.place == f"tests/unit/engine/test_pretended_gpu.py:{fault.__name__}"
    assert found.line == fault.__code__.co_firstlineno + 1
    assert refused([found]) == [str(found)]


@pytest.mark.parametrize("fault", [item, nonzero, unpinned, synchronized])
def test_planted_fault_keeps_a_graph_from_being_captured(gpu, llama, plant, fault):
    plant(fault)
    use(llama, GRAPHS, gpu)
    assert llama.graph_rows == ()
    assert fault.__name__ in llama.refused[0]


def test_a_gpu_tensor_has_no_array_on_the_host(gpu):
    on_gpu = torch.ones(2, device="cuda")
    for convert in (Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="copy it to main memory first"):
            convert(on_gpu)
    assert [each.kind for each in gpu.take()] == [Kind.MIXED] * 2


@pytest.mark.parametrize(
    "harmless",
    [
        lambda hidden: hidden[0].fill_(1.0),
        lambda hidden: hidden[:, 0].zero_(),
        lambda hidden: hidden[0] * torch.tensor(2.0),
        lambda hidden: hidden.__setitem__((0, 0), 1.0),
        lambda hidden: hidden.clone().__setitem__(hidden > 0, 0.0),
        lambda hidden: hidden.masked_fill(hidden > 0, 0.0),
        lambda hidden: hidden[:, 1:2, None].expand(-1, -1, 3, -1),
        lambda hidden: torch.ones(3).pin_memory().to(hidden.device, non_blocking=True),
        lambda hidden: torch.nn.functional.one_hot((hidden[0] > 0).long(), 2),
        lambda hidden: torch.where(hidden > 0, hidden, 0.0),
        lambda hidden: torch.zeros(3, device=hidden.device) + torch.arange(3, device="cuda"),
        lambda hidden: hidden.new_zeros(2).index_add_(
            0, (hidden[0, :, 0] > 0).long(), hidden[0, :, 1]
        ),
    ],
)
def test_what_no_gpu_waits_for_is_not_reported(gpu, llama, plant, harmless):
    plant(harmless)
    llama.forward(*llama.example_batch(4))
    assert refused(gpu.take()) == []


def test_values_and_places_are_those_of_a_gpu(gpu: PretendedGpu):
    found = torch.arange(6, device="cuda").view(2, 3)
    found[1] += 1
    assert found.device == torch.device("cuda", 0)
    assert found.is_cuda
    assert gpu.take() == []
    assert found.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert not found.cpu().is_cuda
    assert [each.kind for each in gpu.take()] == [Kind.READ, Kind.READ]
