"""`pipespec doctor --gpu`: its parts, on a CPU, and what it says of them."""

import json
from typing import Any

import pytest
import torch

from pipespec.cli.main import main
from pipespec.engine.attention import select
from pipespec.engine.low_bit.kept_linear import DequantisedLinear
from pipespec.extras.device_check import correctness

CPU = torch.device("cpu")


def test_wrong_products_of_weights_in_few_bits_are_found(monkeypatch):
    expected = {"kinds": {"int4": None, "fp8": None}, "wrong": []}
    assert correctness.packed_weights(CPU) == expected
    right = DequantisedLinear.product
    monkeypatch.setattr(DequantisedLinear, "product", lambda self, x: right(self, x) * 1.1)
    found = correctness.packed_weights(CPU)
    (wrong,) = found["wrong"]
    assert wrong.startswith("fp8: its error is ")


def test_wrong_attention_is_found(monkeypatch):
    monkeypatch.setattr(correctness, "BACKENDS", ("static", "triton"))
    monkeypatch.setattr(correctness, "DTYPES", (torch.float32,))
    monkeypatch.setattr(correctness, "SHAPES", correctness.SHAPES[1:2])
    found = correctness.attention(CPU)
    assert found["wrong"] == []
    missing = {"not_available": "it needs a GPU, and the device is a cpu"}
    assert found["backends"]["triton"] == {"float32": missing}
    from pipespec.engine.attention.device_plan import TorchBackend

    right = TorchBackend.attend
    monkeypatch.setattr(TorchBackend, "attend", lambda *given: right(*given) + 0.01)
    (wrong,) = correctness.attention(CPU)["wrong"]
    assert wrong.startswith("static, float32, 32/8 heads of 64 sinks: its error is ")


def test_a_type_that_a_backend_lacks_is_no_fault(monkeypatch):
    def missing(name: str, _device: str, dtype: str | None = None) -> str | None:
        return f"{name} lacks {dtype}" if dtype == "float16" else None

    monkeypatch.setattr(select, "missing_requirement", missing)
    monkeypatch.setattr(correctness, "BACKENDS", ("static",))
    monkeypatch.setattr(correctness, "SHAPES", correctness.SHAPES[1:2])
    monkeypatch.setattr(correctness, "DTYPES", (torch.float32, torch.float16))
    found = correctness.attention(CPU)
    assert found["backends"]["static"]["float16"] == {"not_available": "static lacks float16"}
    assert found["wrong"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "cuda:7"], "--gpu names cuda:7, but this machine has"),
        (["--gpu", "tpu"], "--gpu must be cpu, cuda or cuda:N, not 'tpu'."),
    ],
)
def test_wrong_devices_are_one_sentence(arguments, sentence, capsys):
    assert main(["doctor", *arguments]) != 0
    assert sentence in capsys.readouterr().err


def test_part_that_fails_or_finds_a_fault_is_a_problem_and_the_others_run(monkeypatch, capsys):
    def fails(_device: torch.device) -> dict[str, Any]:
        raise RuntimeError("no kernel\nimage")

    parts = {
        "Graphs": fails,
        "Products": lambda device: {"wrong": ["fp8: its error is 1"]},
        "Attention": lambda device: {},
        "Copies": lambda device: {"not_available": "they need a GPU"},
    }
    monkeypatch.setattr(correctness, "PARTS", parts)
    assert main(["doctor", "--gpu", "cpu"]) == 1
    out, err = capsys.readouterr()
    said = "Graphs: 1 wrong\nProducts: 1 wrong\nAttention: passes\nCopies: they need a GPU\n"
    assert out.endswith(said)
    assert err == (
        "pipespec: Graphs: it fails: no kernel image\npipespec: Products: fp8: its error is 1\n"
    )


@pytest.mark.long
@pytest.mark.timeout(700)
def test_all_parts_run_on_a_cpu(capsys):
    assert main(["doctor", "--gpu", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and set(found["gpu"]["parts"]) == set(correctness.PARTS)
