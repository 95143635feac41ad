"""Products and whole slices on a CPU by ggml, llama.cpp's library, called by ctypes."""
