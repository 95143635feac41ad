"""Broken checkpoints: each is refused in one sentence, at once, and before any rank starts.

They are made from whole ones, always the same: a field of the config or an entry of a header is
overwritten by what it cannot be. Beside them stand changes that mean nothing, which must be taken.
Broken bytes, indices and GGUF files: `tests/unit/engine/formats/`.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir
from tests.helpers.models import build

DEMO = resource_dir("demo")
NUM_BROKEN = 120
MOST_S = 4.0  # twice what is wanted, as others may use the machine
MOST_COMMAND_S = 12.0  # with the imports of torch and Transformers
WEIGHTS = "model.safetensors"
NAN, INF = float("nan"), float("inf")
BUILT = {
    "llama": {"tie_word_embeddings": False, "eos_token_id": 2},
    **{kind: {} for kind in ("qwen3_moe", "gpt_neox", "phi3", "gemma2", "deepseek_v3")},
}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that are accepted, by name."""
    root = tmp_path_factory.mktemp("whole")
    found = {"target": DEMO / "target", "draft": DEMO / "draft"}
    found |= {name: build(name, root / name, **how) for name, how in BUILT.items()}
    found["shards"] = build("llama", root / "shards", max_shard_size="30KB")
    for path in found.values():
        inspect(path)  # what is imported and kept once is no part of a refusal
    return found


# --- folders ----------------------------------------------------------------------------------


def read_header(file: Path) -> tuple[Json, int]:
    """The entries of a safetensors header, and the bytes of data behind it."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, file.stat().st_size - 8 - length


def write_header(file: Path, header: Json, data: int) -> None:
    """A file of that header whose data are a hole of so many bytes."""
    file.unlink()
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + data)


def packed(header: Json) -> tuple[Json, int]:
    """The entries one behind the other, each as long as it was."""
    out, end = {}, 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        out[name] = entry | {"data_offsets": [end, end + stop - start]}
        end += stop - start
    return out, end


def copied(whole: Path, to: Path) -> Path:
    """A folder of links to the files of another, each of which may be replaced."""
    to.mkdir()
    for file in whole.iterdir():
        (to / file.name).symlink_to(file)
    return to


def edit(folder: Path, name: str, **changes: Any) -> None:
    """Overwrite fields of a JSON file; None takes a field away."""
    file = folder / name
    content = json.loads(file.read_text()) | changes
    for gone in (key for key, value in changes.items() if value is None):
        del content[gone]
    file.unlink()
    file.write_text(json.dumps(content))


# --- what is done to a config -----------------------------------------------------------------


def config_values(raw: Json, random: Random) -> list[Json]:
    """Changes under which this config describes no model, or another than the files hold."""
    layers, hidden, vocabulary = (
        raw[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    changes: list[Json] = [
        {"num_hidden_layers": layers // 2},
        {"num_hidden_layers": layers + random.randint(1, 5)},
        {"num_hidden_layers": random.choice([0, -1, 10**12, 1.5, "many"])},
        {"hidden_size": hidden * 2},
        {"hidden_size": random.choice([0, -hidden, 10**9, INF])},
        {"vocab_size": vocabulary + random.randint(1, 1000)},
        {"vocab_size": vocabulary - random.randint(1, 50)},
        {"intermediate_size": -raw["intermediate_size"]},
        {"num_attention_heads": 0},
        {"num_attention_heads": [4]},
        {"max_position_embeddings": random.choice([0, -1, NAN, "long"])},
        {"initializer_range": random.choice([NAN, INF])},
        {"model_type": "transformer"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": random.choice([0, -1, NAN])}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}},
        {"rope_parameters": {"rope_type": "circular", "rope_theta": 1e4}},
        {"eos_token_id": random.choice([10**9, -7, vocabulary])},
        {"dtype": "float99"},
    ]
    for name in ("rms_norm_eps", "layer_norm_eps"):
        if name in raw:
            changes += [{name: value} for value in (NAN, -1e-5, INF)]
    for name in ("hidden_act", "hidden_activation"):
        if raw.get(name):
            changes += [{name: "sillu"}, {name: "eval"}]
    changes.append({"num_key_value_heads": random.choice([3, 5, 8, 64])})
    if raw["model_type"] not in ("gpt_neox", "deepseek_v3"):  # which do not look at it
        changes.append({"num_key_value_heads": raw["num_key_value_heads"] * 2})
    if raw.get("head_dim") and "q_lora_rank" not in raw:
        changes.append({"head_dim": raw["head_dim"] + 8})
    if not raw.get("num_experts"):  # whose layers have experts of another size
        changes.append({"intermediate_size": raw["intermediate_size"] * 2})
    else:
        changes += [{"num_experts": 2}, {"num_experts": 10**9}]
    return changes


def break_config(folder: Path, random: Random) -> str:
    raw = json.loads((folder / "config.json").read_text())
    changes = random.choice(config_values(raw, random))
    edit(folder, "config.json", **changes)
    if "eos_token_id" in changes:
        edit(folder, "generation_config.json", **changes)
    return f"config {changes}"


# --- what is done to a header -----------------------------------------------------------------


def break_header(folder: Path, random: Random) -> str:
    file = random.choice(sorted(folder.glob("*.safetensors")))
    header, data = read_header(file)
    name = random.choice([name for name, entry in header.items() if len(entry["shape"]) == 2])
    kind = random.choice(sorted({**ENTRIES, **HEADERS}))
    return f"{kind} of {name}, {change_header(file, header, data, name, kind)}"


def change_header(file: Path, header: Json, data: int, name: str, kind: str) -> Json:
    """What was changed."""
    entry = header[name]
    if kind in ENTRIES:
        changes = ENTRIES[kind](entry)
        header |= {name: {key: v for key, v in (entry | changes).items() if v is not None}}
        write_header(file, header, data)
        return changes
    write_header(file, *HEADERS[kind](header, data, name))
    return {}


def moved(entry: Json, by: int) -> Json:
    start, stop = entry["data_offsets"]
    by = by if start + by >= 0 else -by
    return {"data_offsets": [start + by, stop + by]}


def turned(entry: Json) -> Json:
    rows, columns = entry["shape"]
    return {"shape": [columns, rows] if rows != columns else [rows * 2, columns // 2]}


def integers(entry: Json) -> Json:
    return {"dtype": {"F32": "U32", "BF16": "U16", "F16": "U16"}[entry["dtype"]]}


# Changes of an entry; None takes a field away.
ENTRIES: dict[str, Callable[[Json], Json]] = {
    "overlap": lambda entry: moved(entry, -8),
    "negative shape": lambda _: {"shape": [-1, 4]},
    "absurd shape": lambda _: {"shape": [2**31, 2**31]},
    "overflowing shape": lambda _: {"shape": [2**62, 2**62, 2**62]},
    "fractional shape": lambda _: {"shape": [1.5]},
    "empty shape": lambda _: {"shape": []},
    "unknown type": lambda _: {"dtype": "F7"},
    "integers": integers,
    "turned": turned,
    "flat": lambda entry: {"shape": [entry["shape"][0] * entry["shape"][1]]},
    "beyond the file": lambda entry: {"data_offsets": [entry["data_offsets"][0], 2**40]},
    "no shape": lambda _: {"shape": None},
    "no offsets": lambda _: {"data_offsets": None},
    "no type": lambda _: {"dtype": None},
}


def without(header: Json, name: str) -> Json:
    return {key: entry for key, entry in header.items() if key != name}


BEYOND = "model.layers.97.self_attn.q_proj.weight"
# Changes of a header and of the bytes of its data.
HEADERS: dict[str, Callable[[Json, int, str], tuple[Json, int]]] = {
    "all integers": lambda header, data, _: (
        {name: entry | integers(entry) for name, entry in header.items()},
        data,
    ),
    "dropped": lambda header, _, name: packed(without(header, name)),
    "hole": lambda header, data, name: (without(header, name), data),
    "renamed": lambda header, data, name: (
        without(header, name) | {f"x{name}": header[name]},
        data,
    ),
    "layer beyond": lambda header, data, _: (
        header | {BEYOND: {"dtype": "F32", "shape": [2], "data_offsets": [data, data + 8]}},
        data + 8,
    ),
}


# --- the tests --------------------------------------------------------------------------------


def test_broken_checkpoints_are_refused_in_one_sentence_at_once(
    wholes: dict[str, Path], tmp_path: Path
) -> None:
    wrong, longest = [], 0.0
    for number in range(NUM_BROKEN):
        random = Random(number)
        source = random.choice(sorted(wholes))
        path = copied(wholes[source], tmp_path / str(number))
        how = (break_config, break_header)[number % 2]
        what = f"{number}: {source}, {how(path, random)}"
        begun = time.process_time()
        try:
            info = inspect(path)
        except ModelError as error:
            message = str(error)
            if "\n" in message or not 20 < len(message) < 1500 or str(path) not in message:
                wrong.append(f"{what}: {message!r}")
        else:
            wrong.append(f"{what}: accepted as {info.kind}")
        longest = max(longest, took := time.process_time() - begun)
        if took > MOST_S:
            wrong.append(f"{what}: took {took:.1f} s")
    assert not wrong, "\n".join(wrong)
    assert longest < MOST_S


def test_changes_that_mean_nothing_are_accepted(wholes: dict[str, Path], tmp_path: Path) -> None:
    for name, whole in wholes.items():
        expected = inspect(whole)
        folder = copied(whole, tmp_path / name)
        edit(
            folder,
            "config.json",
            transformers_version="4.0.0",
            _note="of nobody's",
            use_cache=False,
        )
        for file in sorted(folder.glob("*.safetensors")):
            header, data = read_header(file)
            backwards = dict(reversed(header.items()))
            write_header(file, {"__metadata__": {"format": "pt"}, **backwards}, data)
        assert inspect(folder) == replace(expected, path=folder), name


@pytest.mark.parametrize(
    "how",
    [
        *({"num_hidden_layers": 8}, {"vocab_size": 2000}, {"rms_norm_eps": NAN}),
        *("overlap", "dropped"),
    ],
)
def test_the_command_ends_at_once_with_one_sentence(tmp_path: Path, how: Json | str) -> None:
    """In so many seconds of computing. Nothing is waited for, so these are the seconds that it
    lasts where nothing else runs."""
    folder = copied(DEMO / "draft", tmp_path / "model")
    if isinstance(how, str):
        name = "model.layers.1.self_attn.k_proj.weight"
        change_header(folder / WEIGHTS, *read_header(folder / WEIGHTS), name, how)
    else:
        edit(folder, "config.json", **how)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pipespec", "generate", "--prompt", "Once", f"model.draft={folder}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("pipespec: ") and done.stderr.count("\n") == 1, done.stderr
    assert took < MOST_COMMAND_S, f"{took:.1f} s: {done.stderr}"
