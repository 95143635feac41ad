"""Imports and precomputes what ranks need, in torchrun's process before it forks. It is one of the
modules to preload; importing it elsewhere has no use."""

from __future__ import annotations

from contextlib import suppress

import numpy.ma  # noqa: F401 - for `np.unique`
import torch.distributed  # noqa: F401

import pipespec.engine.slice.model_slice  # noqa: F401

with suppress(ImportError, TypeError):  # other versions of Transformers have another, or none
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # Hundreds of patterns are compiled when the first model is loaded: .7 s for every worker.
    get_checkpoint_conversion_mapping("llama")
