"""The types that weights, KV and hidden states may have."""

from __future__ import annotations

# Bytes of a number of each type that weights, KV and hidden states may have.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
