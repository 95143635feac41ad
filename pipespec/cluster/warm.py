"""What torchrun's process has ready before it forks: imported, and where that is slow, computed.

It is named among the modules to preload; whoever else imports it pays for nothing but time.
"""

from __future__ import annotations

from contextlib import suppress

import numpy.ma  # noqa: F401 - for `np.unique`
import torch.distributed  # noqa: F401

import pipespec.engine.model  # noqa: F401

with suppress(ImportError, TypeError):  # other versions of Transformers have another, or none
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # Hundreds of patterns are compiled when the first model is loaded: .7 s for every worker.
    get_checkpoint_conversion_mapping("llama")
