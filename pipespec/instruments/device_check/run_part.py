"""`python -m pipespec.instruments.device_check.run_part PART DEVICE`: runs one part of the check,
and prints its findings as a line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipespec.config.entries import numbered
from pipespec.device_copy import make_current
from pipespec.instruments.device_check import correctness, machine_facts, speed
from pipespec.instruments.device_check.check_device import MARK

FUNCTIONS: Mapping[str, Callable[[torch.device], dict[str, Any]]] = {
    "machine": machine_facts.describe,
    "attention": correctness.check_attention,
    "graphs": correctness.check_graphs,
    "compile": correctness.check_compile,
    "packed_weights": correctness.check_packed_weights,
    "hops": speed.time_hops,
    "stage": speed.time_stage,
    "draft": speed.time_draft,
    "eager": speed.time_eager,
}


def main() -> None:
    """Run the part that the arguments name."""
    name, device = sys.argv[1:]
    device = numbered(device)
    make_current(device)
    with torch.inference_mode():
        found = FUNCTIONS[name](torch.device(device))
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
