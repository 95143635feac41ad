"""Figures and tables of the papers that are not simulated, by number: what there is instead, or why
there is nothing."""

from __future__ import annotations

from dataclasses import dataclass

GPU = "needs a GPU"
SERVERS = "needs a GPU cluster and its servers"
RUNS = "benchmarks.md#"
MODELS = "needs the 70B and its draft on GPUs"


@dataclass(frozen=True)
class Missing:
    """A figure or table of a paper without a simulated one beside it."""

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
    Missing(
        "SpecPipe", "Fig. 14", "TBT by hit rate", f"[hit rates of runs]({RUNS}time-between-tokens)"
    ),
    Missing(
        "SpecPipe",
        "Fig. 15",
        "TBT sampled over greedy: SpecInfer +2.54 %, SpecPipe +4.39 %",
        f"[the demo pair, emulated]({RUNS}greedy-and-sampled): +46 and +18 %",
    ),
    Missing(
        "SpecPipe",
        "Table 1",
        "21.5 to 23.5 GiB a GPU, tree at most 4 MiB",
        f"[computed]({RUNS}memory): 19.1 to 21.0 GiB without a kernel cache, tree 25 MiB of KV",
    ),
    Missing("SpecPipe", "Table 1: kernel cache", "256 MiB a GPU", GPU),
    Missing("SpecPipe", "Tables 3, 4", "SpecInfer's own program", SERVERS),
    Missing("PipeDec", "Fig. 3", "hit ratio of an 8B by candidates", MODELS),
    Missing("PipeDec", "Fig. 5, 6: single data sets", "latency and accuracy", "plot only"),
    Missing(
        "PipeDec",
        "Fig. 7",
        "TBT sampled over greedy: plot only, small loss",
        f"[the demo pair, emulated]({RUNS}greedy-and-sampled), 8 stages: +46 and +18 %",
    ),
    Missing("SwiftSpec", "Table 1", "time of an inference by GPUs", f"{GPU}; an input here"),
    Missing("SwiftSpec", "Tables 3, 7", "times of its kernels", GPU),
    Missing("SwiftSpec", "Fig. 7", "tokens per second of five pairs", SERVERS),
    Missing("SwiftSpec", "Fig. 8: kernels", "1.16 and 1.21 times", GPU),
    Missing("Meta", "Fig. 1", "time per token against vLLM, by batch, and in traffic", SERVERS),
    Missing("Meta", "Fig. 3", "tokens per call by training, by draft layers", "needs its training"),
    Missing("Meta", "Fig. 4b", "time of a step by part and batch", GPU),
    Missing("Meta", "Fig. 6, 7", "overlap of CPU and GPU, fewer synchronisations", GPU),
    Missing("Meta", "Fig. 9", "speed-up by batch and length, four models", SERVERS),
    Missing(
        "Meta",
        "Table 2",
        "tokens by the draft's bits: FP8 0 to -.7 %, INT4 +.3 to -1.1 %",
        f"[the demo pair, counts]({RUNS}a-draft-in-fewer-bits): below chance",
    ),
    Missing("Meta", "Table 2: draft time", "FP8 and INT4 by BF16", GPU),
)
