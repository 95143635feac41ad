"""`pipespec doctor --gpu`: its parts, on a CPU, and what it says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipespec.cli.main import main
from pipespec.engine.attention import select
from pipespec.engine.low_bit.kept_linear import DequantisedLinear
from pipespec.extras.device_check import check_device as check
from pipespec.extras.device_check import correctness
from pipespec.extras.device_check.check_device import faults, page

CPU = torch.device("cpu")


def findings(**changes: dict[str, Any]) -> dict[str, Any]:
    """Of a check in which all passed, but for these parts."""
    parts = {part.name: {} for part in check.PARTS} | changes
    return {
        "date": "2026-01-01",
        "device": "cuda:0",
        "seconds": 1.0,
        "parts": parts,
    }


def test_page_says_what_did_not_pass():
    assert "Everything that ran passed." in page(findings())
    wrong = {"wrong": ["triton, bfloat16: its error is 1"]}
    text = page(findings(attention=wrong, compiled={"failed": "it was ended after 200 s"}))
    assert "- Attention backends, beside attention by its definition: triton, bfloat16: its" in text
    assert "- torch.compile: it was ended after 200 s" in text


def test_parts_that_crash_or_hang_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "parts.py").write_text(
        "import os, sys, threading\n"
        "name = sys.argv[1]\n"
        "if name == 'crash': os.abort()\n"
        "if name == 'raise': raise RuntimeError('no kernel image')\n"
        "if name == 'hang': threading.Event().wait()\n"
        "print('findings: {\"device\": \"' + sys.argv[2] + '\"}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(check, "MODULE", "parts")
    limits = {"crash": 60, "raise": 60, "hang": 0.5, "good": 60}
    parts = [check.Part(name, name, limit) for name, limit in limits.items()]
    monkeypatch.setattr(check, "PARTS", parts)
    reported = []
    found = check.check_device("cuda:3", lambda part, _: reported.append(part.name))
    assert reported == list(limits)
    assert not found["ok"]
    assert found["parts"]["crash"]["failed"].startswith("its process ended with -6")
    assert "no kernel image" in found["parts"]["raise"]["failed"]
    assert found["parts"]["hang"]["failed"] == "it was ended after 0 s"
    assert found["parts"]["good"] == {"device": "cuda:3"}


def test_a_wrong_result_is_no_success(monkeypatch: pytest.MonkeyPatch):
    wrong = {"wrong": ["fp8: its error is 1"]}
    monkeypatch.setattr(check, "_run", lambda *_: {})
    assert check.check_device("cpu")["ok"]
    monkeypatch.setattr(check, "_run", lambda part, *_: wrong if "packed" in part.name else {})
    assert not check.check_device("cpu")["ok"]


def test_wrong_products_of_weights_in_few_bits_are_found(monkeypatch: pytest.MonkeyPatch):
    expected = {"kinds": {"int4": None, "fp8": None}, "wrong": []}
    assert correctness.packed_weights(CPU) == expected
    right = DequantisedLinear.product
    monkeypatch.setattr(DequantisedLinear, "product", lambda self, x: right(self, x) * 1.1)
    found = correctness.packed_weights(CPU)
    (wrong,) = faults(found)
    assert wrong.startswith("fp8: its error is ")


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(correctness, "BACKENDS", ("static", "triton"))
    monkeypatch.setattr(correctness, "DTYPES", (torch.float32,))
    monkeypatch.setattr(correctness, "SHAPES", correctness.SHAPES[1:2])
    found = correctness.attention(CPU)
    assert faults(found) == []
    missing = {"not_available": "it needs a GPU, and the device is a cpu"}
    assert found["backends"]["triton"] == {"float32": missing}
    from pipespec.engine.attention.device_plan import TorchBackend

    right = TorchBackend.attend
    monkeypatch.setattr(TorchBackend, "attend", lambda *given: right(*given) + 0.01)
    (wrong,) = faults(correctness.attention(CPU))
    assert wrong.startswith("static, float32, 32/8 heads of 64 sinks: its error is ")


def test_a_type_that_a_backend_lacks_is_no_fault(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str, _device: str, dtype: str | None = None) -> str | None:
        return f"{name} lacks {dtype}" if dtype == "float16" else None

    monkeypatch.setattr(select, "missing_requirement", missing)
    monkeypatch.setattr(correctness, "BACKENDS", ("static",))
    monkeypatch.setattr(correctness, "SHAPES", correctness.SHAPES[1:2])
    monkeypatch.setattr(correctness, "DTYPES", (torch.float32, torch.float16))
    found = correctness.attention(CPU)
    assert found["backends"]["static"]["float16"] == {"not_available": "static lacks float16"}
    assert faults(found) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "cuda:7"], "cuda:7 is not there"),
        (["--gpu", "tpu"], "--gpu must be cpu, cuda or cuda:N, not 'tpu'."),
    ],
)
def test_wrong_devices_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["doctor", *arguments]) != 0
    assert sentence in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(700)
def test_all_parts_run_on_a_cpu(tmp_path: Path):
    command = [sys.executable, "-m", "pipespec", "doctor", "--gpu", "cpu"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "pipespec-check.json").read_text())
    assert found["ok"] and found["seconds"] <= check.LIMIT_S
    assert "passed." in (tmp_path / "pipespec-check.txt").read_text()
