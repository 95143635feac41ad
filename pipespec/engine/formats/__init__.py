"""How checkpoints store tensors: safetensors, GGUF, and packed formats."""
