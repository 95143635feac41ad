"""What the target says after every prompt, for synthetic draft tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipespec.config.compose import compose
from pipespec.errors import PipespecError
from pipespec.extras.bench.dataset import Load, Sample
from pipespec.extras.bench.measurement import bench

# What a truth file holds beyond the answer: a tree reaches further than the text.
TRUTH_MARGIN = 64
# Settings that say what the target answers; all others only say how fast.
ANSWER_SETTINGS = ("model", "decode", "sampling", "controller", "transport", "cluster.devices")


def record_reference(
    samples: Sequence[Sample], path: str | Path, *overrides: str, prompt_tokens: int | None = None
) -> None:
    """Write what the target says after every prompt: the truth of `proposer=synthetic`.

    One plain stage without draft tokens and without a pace decodes `decode.max_new_tokens` and a
    margin beyond, whatever the end of text is. Each line of the file is a JSON list of token
    ids, prompt and answer.

    Args:
        overrides: settings of the run that will use the file; those that do not say what the
            target answers are left out.
        prompt_tokens: as in that run.

    Raises ConfigError as `bench` does, and PipespecError if the file cannot be written.
    """
    kept = [text for text in overrides if text.partition("=")[0].startswith(ANSWER_SETTINGS)]
    config = compose([*kept, "cluster.stages=1", "policy=root", "proposer=suffix"])
    decode = replace(
        config.decode,
        max_new_tokens=config.decode.max_new_tokens + TRUTH_MARGIN,
        ignore_eos=True,
        stop=[],
    )
    done = bench(
        replace(config, decode=decode),
        samples,
        load=Load(min(len(samples), config.scheduler.max_num_seqs)),
        prompt_tokens=prompt_tokens,
    )
    # The source takes the first text that begins with a prompt. Where one prompt begins
    # another, the shorter one must not find the text of the longer.
    texts = sorted((request.prompt_ids, request.token_ids) for request in done.requests)
    lines = [json.dumps(prompt + answer) + "\n" for prompt, answer in texts]
    try:
        Path(path).write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise PipespecError(f"{str(path)!r} cannot be written: {error.strerror}.") from error
