"""The Python interface: `LLM` and `AsyncLLM`, with names as vLLM has them."""
