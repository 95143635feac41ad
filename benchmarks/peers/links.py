"""pipespec beside llama.cpp and vLLM over links with a real delay and bandwidth, not emulated.

    python -m tools.inflate build/target --parameters 200M
    python -m benchmarks.peers.links --target build/target --draft demo/draft

Every engine spreads the target over the same hosts (`benchmarks.peers.delayed_links`): network
namespaces of this machine, so all of them share its cores. All engines decode the same prompts,
one engine at a time and all of them in every repeat, and each starts anew (`docs/peers.md` says how
to get the others). What pipespec learns of steps is kept from repeat to repeat, as it is for any
user, but not from delay to delay: its first repeat knows nothing. Their tokens are compared with
those of Hugging Face `generate`, which computes them without a link; of GGUF files, and where
tokens are drawn, with those of pipespec's plain pipeline. Other engines decode greedily and a
request at a time only.
"""

from __future__ import annotations

import argparse
import os
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.progress import track

from benchmarks.common import experiment, plot
from benchmarks.pages.stored_results import with_range
from benchmarks.peers.compare_engines import (
    add_job,
    conditions,
    equal_answers,
    job_of,
    parse_job,
    spread,
)
from benchmarks.peers.delayed_links import TCP_SETTINGS, LinkCheck, check, delayed_links
from benchmarks.peers.link_engines import LinkedEngine, engines
from benchmarks.peers.python_engines import Job, PeerFailed, Run, hugging_face, in_child
from benchmarks.peers.server_engines import find_llama_cpp, find_vllm
from pipespec.engine.formats.gguf import is_gguf
from pipespec.errors import ConfigError
from tools.rig import testbed

PLAIN, DRAFTING, VLLM, ROOT = "llama.cpp", "llama.cpp with draft", "vLLM", "pipespec root"


@dataclass(frozen=True)
class Race:
    """All runs over links of one delay: those of each engine, how much of a core the relay used
    meanwhile, and why engines fell out."""

    check: LinkCheck
    runs: Mapping[str, Sequence[Run]]
    relay_cores: Mapping[str, float]
    failed: Mapping[str, str] = field(default_factory=dict)


def race(
    job: Job,
    found: Mapping[str, LinkedEngine],
    delay_ms: float,
    gbit: float,
    hosts: int,
    repeats: int,
    plain_prompts: int,
    uneven: Mapping[str, Any],
) -> Race:
    """Every engine in every repeat over links of one delay, every second time in reverse. Each has
    hosts of its own, so nothing of another is left. Those without a draft decode so many prompts,
    beside the first that does not count, as what a token takes there does not depend on the
    text."""
    first = slice(plain_prompts + 1)
    few = replace(job, samples=job.samples[first], prompts=job.prompts[first])
    runs: dict[str, list[Run]] = {name: [] for name in found}
    used = dict.fromkeys(found, 0.0)
    spent = dict.fromkeys(found, 0.0)
    turns: list[str] = []
    for repeat in range(repeats):
        turns += list(found) if repeat % 2 == 0 else list(found)[::-1]
    with delayed_links(hosts, delay_ms, gbit, **uneven) as bed:
        links = check(bed)
    failed: dict[str, str] = {}
    for name in track(turns, f"{delay_ms:g} ms"):
        if name in failed:
            continue
        with delayed_links(hosts, delay_ms, gbit, **uneven) as bed:
            asked, began = few if name in (PLAIN, VLLM, ROOT) else job, time.monotonic()
            try:
                runs[name].append(found[name](bed, asked))
                assert len(runs[name][-1].answers) == len(asked.prompts)
            except PeerFailed as error:
                failed[name] = str(error)
            spent[name] += time.monotonic() - began
            used[name] += bed.relay_cpu_s()
    kept = {name: ran for name, ran in runs.items() if name not in failed}
    return Race(links, kept, {name: used[name] / spent[name] for name in kept}, failed)


def figures(found: Race, reference: Run, eos: Sequence[int]) -> list[dict[str, Any]]:
    """One row per engine over links of one delay. A ratio is of the same repeat's times between
    tokens; the best draft of llama.cpp, n-grams among them, is the one with the least median."""
    tbt = {name: [run.tbt_ms for run in ran] for name, ran in found.runs.items()}
    drafting = [name for name in tbt if name.startswith(f"{PLAIN} with ")]
    best = min(drafting, key=lambda name: spread(tbt[name])["median"], default="")
    baselines = {
        "times_llama_cpp": PLAIN,
        "times_llama_cpp_with_draft": DRAFTING,
        "times_llama_cpp_with_its_best_draft": best,
        "times_vllm": VLLM,
    }
    rows = []
    for name, ran in found.runs.items():
        equal = equal_answers(ran, reference, eos)
        ratios = {
            column: spread([b / own for b, own in zip(tbt[baseline], tbt[name], strict=True)])
            for column, baseline in baselines.items()
            if baseline in tbt
        }
        per_step = [run.tokens_per_step for run in ran if run.tokens_per_step is not None]
        rows.append(
            {
                "delay_ms": found.check.delay_ms,
                "engine": name,
                "repeats": len(ran),
                "load_s": spread([run.load_s for run in ran]),
                "ttft_ms": spread([run.ttft_ms for run in ran]),
                "tbt_ms": spread(tbt[name]),
                "tokens_per_step": spread(per_step) if per_step else None,
                **ratios,
                "relay_cores": found.relay_cores[name],
                "equal_answers": sum(equal),
                "answers": len(equal),
            }
        )
    return rows


# --- what comes out -----------------------------------------------------------------------------


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row as it is printed."""
    spreads = {
        name.replace("times_", "× "): with_range(value)
        for name, value in row.items()
        if isinstance(value, dict)
    }
    return {
        "delay ms": f"{row['delay_ms']:g}",
        "engine": row["engine"],
        "repeats": str(row["repeats"]),
        **spreads,
        "relay": f"{row['relay_cores']:.2f}",
        "equal": f"{row['equal_answers']} of {row['answers']}",
    }


def draw(title: str, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time between tokens by delay, and how many times as fast pipespec is."""
    names = list(dict.fromkeys(row["engine"] for row in rows))
    of = {name: [row for row in rows if row["engine"] == name] for name in names}
    with plot.figure(path, title, columns=2, size=(9.6, 4.0)) as (left, right):
        plot.lines(
            left,
            {
                name: [(row["delay_ms"], row["tbt_ms"]["median"]) for row in of_engine]
                for name, of_engine in of.items()
            },
            xlabel="delay of a link, one way, ms",
            ylabel="time between tokens, ms",
            legend=False,
        )
        left.legend(loc="upper left")
        named = dict.fromkeys(name for row in rows for name in row)
        ratios = [name for name in named if name.startswith("times_")]
        plot.lines(
            right,
            {
                name.removeprefix("times_").replace("_", " "): [
                    (row["delay_ms"], row[name]["median"])
                    for row in of.get("pipespec", [])
                    if name in row
                ]
                for name in ratios
            },
            xlabel="delay of a link, one way, ms",
            ylabel="pipespec is so many times as fast as",
            legend=False,
        )
        right.legend(loc="upper left")


def parse() -> argparse.Namespace:
    parser = experiment.parser(__doc__, plot=True)
    add_job(parser, prompts=3, tokens=48)
    parser.add_argument(
        "--delays", type=float, nargs="+", default=[0, 2, 10, 40], help="one way, ms (0 2 10 40)"
    )
    parser.add_argument("--gbit", type=float, default=1.0, help="Gbit/s of each host (1)")
    parser.add_argument("--stages", type=int, default=4, help="hosts with layers (4)")
    parser.add_argument(
        "--plain-prompts", type=int, default=4, help="of engines without a draft, at most (4)"
    )
    parser.add_argument(
        "--draft-tokens",
        type=int,
        nargs="*",
        default=[0, 8],
        help="of llama.cpp's drafts at most, 0: its default (0 8)",
    )
    parser.add_argument("--ngrams", nargs="*", default=[], help="kinds of llama.cpp's n-grams")
    parser.add_argument("--settings", nargs="*", default=[], help="of pipespec")
    parser.add_argument("--temperature", type=float, default=0.0, help="pipespec alone (0)")
    parser.add_argument(
        "--quota", type=float, help="processors of the second stage's host (all), such as .3"
    )
    parser.add_argument("--slow-link", type=float, help="ms one way from the second to the third")
    parser.add_argument("--slow-draft", type=float, help="ms one way from and to the first host")
    parser.add_argument("--concurrency", type=int, default=1, help="requests; pipespec alone (1)")
    options = parse_job(parser)
    if (lacking := testbed.missing()) is not None:
        parser.error(f"{lacking}.")
    if options.quota and not testbed.CONTROL_GROUPS.is_dir():
        parser.error("--quota needs the control groups of Linux, version 1.")
    if options.slow_link and options.stages < 3:
        parser.error("--slow-link needs three stages.")
    return options


def uneven(options: argparse.Namespace) -> dict[str, Any]:
    """What `Testbed` takes for a stage and links that are slower than others; the first host has
    the head and the draft, and no stage."""
    slow = {("c", "d"): options.slow_link} if options.slow_link else {}
    if options.slow_draft:
        stages = string.ascii_lowercase[1 : options.stages + 1]
        slow |= {("a", stage): options.slow_draft for stage in stages}
    quotas = {"c": options.quota} if options.quota else {}
    return {"slow": slow, "quotas": quotas}


def main() -> None:
    options = parse()
    job, eos = job_of(options)
    job = replace(job, temperature=options.temperature, concurrency=options.concurrency)
    others = not options.temperature and options.concurrency == 1
    drawn = f", temperature {job.temperature:g}" if job.temperature else ""
    several = f", {job.concurrency} requests at a time" if job.concurrency > 1 else ""
    title = (
        f"Measured, {options.stages} stages on {len(job.cores)} cores, {job.dtype or 'GGUF'}, "
        f"links of {options.gbit:g} Gbit/s: {options.prompts} prompts × {options.tokens} tokens"
        f"{drawn}{several}"
    )
    load_before = os.getloadavg()[0]
    began = time.perf_counter()
    missing: dict[str, str] = {}
    races: list[Race] = []
    result: dict[str, Any] = {}
    origin = experiment.provenance()  # of the code that runs, before its result is in the tree
    with TemporaryDirectory() as folder:
        # Hugging Face's tokens come first: without them the race is worth nothing.
        reference = None
        if not (is_gguf(job.target) or job.temperature):
            reference = in_child(hugging_face, job, assisted=False)
        llama, of_vllm = None, None
        if others:
            try:
                llama = find_llama_cpp(job, Path(folder))
            except ConfigError as error:
                missing["llama.cpp"] = str(error)
            try:
                if is_gguf(job.target):
                    raise ConfigError("it is compared with checkpoints alone.")
                of_vllm = find_vllm()
            except ConfigError as error:
                missing["vLLM"] = str(error)
        known = engines(llama, of_vllm, options.draft_tokens, options.ngrams, options.settings)
        found = {
            name: engine
            for name, engine in known.items()
            if any(part in name for part in options.only) or (name == ROOT and reference is None)
        }
        for delay in options.delays:
            job = replace(job, cache=Path(folder) / f"learnt over {delay:g} ms")
            how = options.gbit, options.stages + 1, options.repeats, options.plain_prompts
            races.append(race(job, found, delay, *how, uneven(options)))
            result = {
                **origin,
                "title": title,
                "emulated": False,
                "rows": [
                    row
                    for each in races
                    for row in figures(each, reference or each.runs[ROOT][0], eos)
                ],
                "links": [asdict(each.check) for each in races],
                "tcp": TCP_SETTINGS,
                "settings": options.settings,
                "uneven": {
                    "quota": options.quota,
                    "slow_link_ms": options.slow_link,
                    "slow_draft_ms": options.slow_draft,
                },
                **conditions(job, load_before, began),
                "missing": missing,
                "failed": {
                    f"{name}, {each.check.delay_ms:g} ms": why
                    for each in races
                    for name, why in each.failed.items()
                },
            }
            if options.json:  # after each delay: a race takes most of an hour
                experiment.store(options.json, result)
    experiment.show(f"{result['title']}; median (min..max)", list(map(cells, result["rows"])))
    for name, why in (missing | result["failed"]).items():
        print(f"{name}: {why}")
    if options.plot:
        draw(result["title"], result["rows"], options.plot)


if __name__ == "__main__":
    main()
