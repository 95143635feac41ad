"""Imports and precomputes what ranks need, in the agent before it forks, and keeps out
what they do not. It is one of the modules to preload; importing it elsewhere has no use."""

from __future__ import annotations

import sys
from contextlib import suppress

import numpy.ma  # noqa: F401 - for `np.unique`
import torch.distributed

# torch and Transformers import these wherever they are, for 80 MB: None lets imports fail as if
# they were not installed. One that is used is imported before this module.
unused = ["torchao"] if torch.accelerator.is_available() else ["torchao", "triton"]
sys.modules.update(dict.fromkeys(set(unused) - sys.modules.keys()))  # type: ignore[arg-type]

import pipespec.engine.slice.model_slice  # noqa: F401, E402

with suppress(ImportError, TypeError):  # other versions of Transformers have another, or none
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # Hundreds of patterns are compiled when the first model is loaded: .7 s for every worker.
    get_checkpoint_conversion_mapping("llama")
