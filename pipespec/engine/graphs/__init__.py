"""A slice captured and replayed: CUDA graphs, compiled layers, and graphs of ggml."""
