"""Figures, tables and ideas of the papers that are not simulated, by number: what there is instead,
or why there is nothing."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.pages.stored_results import result
from pipespec.core import EXACT

GPU = "left: needs a GPU"
SERVERS = "left: needs a GPU cluster and its servers"
MODELS = "left: needs the 70B and its draft on GPUs"


def sampled() -> str:
    """Tokens per step of sampled text as a share of greedy ones, counted."""
    stored = result("lossy")
    shares = []
    for policy in ("static_tree", "level", "best_first"):
        greedy, drawn = (
            each["tokens_per_step"]
            for each in stored["rows"]
            if (each["policy"], each["acceptance"]) == (policy, EXACT)
        )
        shares.append(f"`{policy}` {drawn / greedy:.2f}")
    where = "[tokens per step of the demo pair](sampling.md#lossy-acceptance), over greedy ones"
    return f"measured: {where}: {', '.join(shares)}"


SAMPLED = sampled()


@dataclass(frozen=True)
class Missing:
    """A figure, table or idea of a paper without a simulated one beside it: done, measured, or left
    with the reason."""

    paper: str
    figure: str
    shows: str
    why: str


MISSING = (
    Missing("SpecPipe", "Fig. 7", "hit ratio by candidates, ten books, contexts of 20K", MODELS),
    Missing("SpecPipe", "Fig. 9, 12", "time of one layer by tokens; trace of nine devices", GPU),
    Missing(
        "SpecPipe",
        "Fig. 11: EAGLE3",
        "272.30 ms a token",
        "left: heads keep one batch in the pipeline here",
    ),
    Missing("SpecPipe", "Fig. 13: TP/PP-vLLM", "2.55 to 3.44 times slower", SERVERS),
    Missing(
        "SpecPipe",
        "Fig. 14; bars and curves of Fig. 11, 13, 16",
        "TBT by hit rate, by data set, by throughput",
        "left: plot only, save HumanEval-X",
    ),
    Missing("SpecPipe", "Fig. 15", "TBT sampled: SpecInfer +2.54 %, SpecPipe +4.39 %", SAMPLED),
    Missing(
        "SpecPipe",
        "Table 1",
        "21.5 to 23.5 GiB a GPU, tree at most 4 MiB, 256 MiB of kernels",
        "computed: 19.1 to 21.0 GiB without kernels, tree 25 MiB of KV (`pipespec plan --gpus`)",
    ),
    Missing("SpecPipe", "Tables 3, 4", "SpecInfer's own program", SERVERS),
    Missing("PipeDec", "Fig. 3", "hit ratio of an 8B by candidates", MODELS),
    Missing("PipeDec", "Fig. 7", "TBT sampled over greedy: plot only, small loss", SAMPLED),
    Missing(
        "PipeDec",
        "App. A",
        "a scheduler that says who sends first",
        "left: a link has one sender, and holds as many batches as its delay needs",
    ),
    Missing("PipeDec", "App. B", "a controller with a dynamic task graph", "done: `controller/`"),
    Missing(
        "SwiftSpec",
        "Algorithm 1, lines 15 and 16",
        "a batch waits until the draft has filled the tree",
        "done: `best_first` delays a batch for a draft round where that pays",
    ),
    Missing("SwiftSpec", "Tables 1, 3, 7", "times by GPUs, of its kernels", GPU),
    Missing("SwiftSpec", "Fig. 7; Fig. 8: kernels", "five pairs; 1.16 and 1.21 times", SERVERS),
    Missing("Meta", "Fig. 1, 9", "against vLLM by batch and in traffic; four models", SERVERS),
    Missing("Meta", "Fig. 3", "tokens per call by training, by layers", "left: needs its training"),
    Missing("Meta", "Fig. 4b, 6, 7", "a step by part; CPU beside GPU; fewer stops", GPU),
    Missing("Meta", "§3: compiled sampling", "1.5 times", GPU),
    Missing("Meta", "§3: first token at prefill", "8 to 30 % of its time", "done: the last stage"),
    Missing("Meta", "disaggregation of prefill", "no figure", "left: made for many requests"),
    Missing("Meta", "KV kept across requests", "no figure", "done: the prefix cache"),
    Missing(
        "Meta", "Table 2", "draft in FP8 0 to -.7 %, INT4 +.3 to -1.1 %", "measured: by chance"
    ),
)
