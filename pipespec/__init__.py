"""Lossless speculative decoding of one large language model over several boxes."""

import logging

# Transformers imports torchao wherever it is installed, which then tells every process of kernels
# for other machines than this.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
