"""Prompts for benchmarks, from JSON Lines: {"id", "benchmark", "prompt"} per line; and when each of
many is handed in.

Other keys are ignored. A text file (`.txt`) has a prompt per line. Whatever is wrong is one
sentence with file and line in a ConfigError.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from pipespec.errors import ConfigError
from pipespec.limits import MAX_COUNT, check_number, check_whole
from pipespec.system.folders import resource_dir
from pipespec.system.validation import (
    decode,
    is_folder,
    is_whole,
    parse_json,
    read_bytes,
    readable,
    shown,
)

SHIPPED = "prompts"  # the folder of those that belong to pipespec
PATTERN = "*.jsonl"
PLAIN = ".txt"
MOST_BYTES = 2**30
# Requests per second: one in some days.
MIN_RATE = 1e-6


@dataclass(frozen=True)
class Sample:
    """One prompt: its id, unique in the data set, the benchmark that it is of, and its text."""

    id: str
    benchmark: str
    prompt: str


def chosen(path: str | None) -> Path:
    """Where prompts are: the path that is given, or those of pipespec. Raises ConfigError."""
    return resource_dir(SHIPPED) if path is None else Path(path)


def load(path: str | os.PathLike[str], limit: int | None = None) -> list[Sample]:
    """The samples of a file, or of all files `*.jsonl` of a folder in the order of their names.

    With `limit` at most so many, taken at equal distances from the whole. Raises ConfigError.
    """
    if limit is not None:
        check_whole("num_prompts", limit, 1, MAX_COUNT)
    path = Path(path)
    files = sorted(path.glob(PATTERN)) if is_folder(path) else [path]
    if not files:
        raise ConfigError(f"The folder {str(path)!r} holds no file {PATTERN}; pass another.")
    samples: list[Sample] = []
    seen: dict[str, str] = {}
    for place, sample in (found for file in files for found in _read(file)):
        if sample.id in seen:
            raise ConfigError(
                f"{place}: the id {sample.id!r} is that of {seen[sample.id]} already; give "
                "every sample an id of its own."
            )
        seen[sample.id] = place
        samples.append(sample)
    if not samples:
        raise ConfigError(f"The data set {str(path)!r} holds no sample; pass another --dataset.")
    count = len(samples) if limit is None else min(limit, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def _read(file: Path) -> Iterator[tuple[str, Sample]]:
    """The samples of a file, each with the place where it stands. Empty lines are none."""
    with readable(f"The data set {str(file)!r} cannot be read", "pass another --dataset PATH"):
        data = read_bytes(file, most=MOST_BYTES, pipe=True)
    plain = file.suffix == PLAIN
    # Not `splitlines`: a text may hold characters that it takes for the end of a line.
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        with readable(place, f"write {'it as UTF-8' if plain else 'one JSON object per line'}"):
            item = decode(line).strip() if plain else parse_json(line)
        yield place, Sample(place, file.stem, item) if plain else _sample(item, place)


def _sample(item: Any, place: str) -> Sample:
    if not isinstance(item, dict):
        raise ConfigError(f"{place} is not a JSON object; write one object per line.")
    values = {}
    for name in (field.name for field in fields(Sample)):
        if name not in item:
            raise ConfigError(f"{place} has no {name!r}; every sample needs id, benchmark, prompt.")
        values[name] = value = item[name]
        if not isinstance(value, str):
            raise ConfigError(f"{place}: {name!r} is {shown(value)}, but must be a text.")
        if not value:
            raise ConfigError(f"{place}: {name!r} is empty, but must have at least one character.")
        if not is_whole(value):
            raise ConfigError(f"{place}: {name!r} holds half a character (a lone surrogate).")
    return Sample(**values)


@dataclass(frozen=True)
class Load:
    """How many requests come at once, and how often one comes. Raises ConfigError.

    Attributes:
        concurrency: how many are handed in and not yet finished, at most; None: any number.
        request_rate: per second (of the emulated machine, if there is one), as a Poisson
            process; inf: each as soon as `concurrency` allows.
    """

    concurrency: int | None
    request_rate: float = math.inf

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            check_whole("concurrency", self.concurrency, 1, MAX_COUNT)
        if self.request_rate != math.inf:
            check_number("request_rate", self.request_rate, MIN_RATE, MAX_COUNT, hint=", or inf")

    @classmethod
    def of(cls, concurrency: int | None = None, request_rate: float | None = None) -> Load:
        """What is meant by what was given: without anything, one request after another; with a
        rate alone, any number at once."""
        if request_rate is None:
            return cls(1 if concurrency is None else concurrency, math.inf)
        return cls(concurrency, request_rate)

    def due_s(self, count: int) -> list[float]:
        """When so many requests come, in seconds since the start.

        A Poisson process as in `vllm bench serve`, and scaled as there: the last one comes after
        `count` / rate seconds, so that the rate is exact.
        """
        if self.request_rate == math.inf:
            return [0.0] * count
        chance = Random(0)
        came = list(accumulate(chance.expovariate(1.0) for _ in range(count)))
        return [at / came[-1] * count / self.request_rate for at in came]


ONE_AT_A_TIME = Load(1)
