"""Figures and tables of the papers that cannot be had here, by number, and why."""

from __future__ import annotations

from dataclasses import dataclass

GPU = "needs a GPU"
SERVERS = "needs a GPU cluster and its servers"
MODELS = "needs the 70B and its draft on GPUs"


@dataclass(frozen=True)
class Missing:
    """A figure or table of a paper that has no figure of ours beside it."""

    paper: str
    figure: str
    shows: str
    why: str


MISSING = (
    Missing("SpecPipe", "Fig. 7", "hit ratio by candidates, ten books, contexts of 20K", MODELS),
    Missing("SpecPipe", "Fig. 9", "time of one layer by tokens, several GPUs", GPU),
    Missing(
        "SpecPipe", "Fig. 11, 13: bars of single data sets", "TBT", "plot only, save HumanEval-X"
    ),
    Missing("SpecPipe", "Fig. 11: EAGLE3", "272.30 ms a token", "heads are refused here"),
    Missing("SpecPipe", "Fig. 12", "trace of nine devices", GPU),
    Missing("SpecPipe", "Fig. 13: TP/PP-vLLM", "2.55 to 3.44 times slower", SERVERS),
    Missing("SpecPipe", "Table 1: kernel cache", "256 MiB a GPU", GPU),
    Missing("SpecPipe", "Tables 3, 4", "SpecInfer's own program", SERVERS),
    Missing("PipeDec", "Fig. 3", "hit ratio of an 8B by candidates", MODELS),
    Missing("PipeDec", "Fig. 5, 6: single data sets", "latency and accuracy", "plot only"),
    Missing("SwiftSpec", "Table 1", "time of an inference by GPUs", f"{GPU}; an input here"),
    Missing("SwiftSpec", "Tables 3, 7", "times of its kernels", GPU),
    Missing("SwiftSpec", "Fig. 7", "tokens per second of five pairs", SERVERS),
    Missing("SwiftSpec", "Fig. 8: kernels", "1.16 and 1.21 times", GPU),
    Missing("Meta", "Fig. 1", "time per token against vLLM, by batch, and in traffic", SERVERS),
    Missing("Meta", "Fig. 3", "tokens per call by training, by draft layers", "needs its training"),
    Missing("Meta", "Fig. 4b", "time of a step by part and batch", GPU),
    Missing("Meta", "Fig. 6, 7", "overlap of CPU and GPU, fewer synchronisations", GPU),
    Missing("Meta", "Fig. 9", "speed-up by batch and length, four models", SERVERS),
    Missing("Meta", "Table 2: draft time", "FP8 and INT4 by BF16", GPU),
)
