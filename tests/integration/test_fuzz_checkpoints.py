"""Broken checkpoints: each is refused in one sentence, at once, and before any rank starts.

Two hundred of them are made from whole ones, always the same: a field of the config, an entry of a
header, a count in a GGUF file is overwritten by what it cannot be. Beside them stand changes that
mean nothing, which must be taken.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from pipespec.engine.checkpoint.inspection import inspect
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir
from tests.helpers.models import build
from tools.rig.gguf_files import write

DEMO = resource_dir("demo")
NUM_BROKEN = 200
MOST_S = 4.0  # twice what is wanted, as others may use the machine
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAN, INF = float("nan"), float("inf")
BUILT = {
    "llama": {"tie_word_embeddings": False, "eos_token_id": 2},
    "qwen3_moe": {},
    "gpt_neox": {},
    "phi3": {},
    "gemma2": {},
    "deepseek_v3": {},
}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that are accepted, by name."""
    root = tmp_path_factory.mktemp("whole")
    found = {"target": DEMO / "target", "draft": DEMO / "draft"}
    found |= {name: build(name, root / name, **how) for name, how in BUILT.items()}
    found["shards"] = build("llama", root / "shards", max_shard_size="30KB")
    found["gguf"] = write(found["llama"], root / "model.gguf", "llama", lambda _: Type.F16)
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
    if whole.is_file():
        return Path(shutil.copy(whole, to.with_suffix(".gguf")))
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
        {"intermediate_size": raw["intermediate_size"] * 2},
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
    if raw.get("num_experts"):
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
    weights = [name for name, entry in header.items() if len(entry["shape"]) == 2]
    name = random.choice(weights)
    entry = dict(header[name])
    start, stop = entry["data_offsets"]
    rows, columns = entry["shape"]
    kind = random.choice(sorted(HEADERS))
    entry, header, data = HEADERS[kind](entry, header, data, name, random)
    if entry is not None:
        header = header | {name: entry}
    write_header(file, header, data)
    return f"{kind} of {name} {rows}x{columns} at {start}:{stop}"


def _moved(by: int) -> Callable[..., Any]:
    def change(entry: Json, header: Json, data: int, *_: Any) -> Any:
        start, stop = entry["data_offsets"]
        by_now = by if start + by >= 0 and stop + by <= data else -by
        return entry | {"data_offsets": [start + by_now, stop + by_now]}, header, data

    return change


def _shape(*shape: Any) -> Callable[..., Any]:
    return lambda entry, header, data, *_: (entry | {"shape": list(shape)}, header, data)


def _dtype(dtype: Any) -> Callable[..., Any]:
    return lambda entry, header, data, *_: (entry | {"dtype": dtype}, header, data)


def _integers(_: Json, header: Json, data: int, *__: Any) -> Any:
    kinds = {"F32": "I32", "BF16": "I16", "F16": "I16"}
    return None, {n: e | {"dtype": kinds[e["dtype"]]} for n, e in header.items()}, data


def _one_of_integers(entry: Json, header: Json, data: int, *_: Any) -> Any:
    kinds = {"F32": "U32", "BF16": "U16", "F16": "U16"}
    return entry | {"dtype": kinds[entry["dtype"]]}, header, data


def _dropped(_: Json, header: Json, __: int, name: str, ___: Random) -> Any:
    kept, end = packed({n: e for n, e in header.items() if n != name})
    return None, kept, end


def _hole(_: Json, header: Json, data: int, name: str, __: Random) -> Any:
    return None, {n: e for n, e in header.items() if n != name}, data


def _renamed(_: Json, header: Json, data: int, name: str, __: Random) -> Any:
    return None, {("x" + n if n == name else n): e for n, e in header.items()}, data


def _beyond(_: Json, header: Json, data: int, *__: Any) -> Any:
    extra = {"dtype": "F32", "shape": [2], "data_offsets": [data, data + 8]}
    return None, header | {"model.layers.97.self_attn.q_proj.weight": extra}, data + 8


def _turned(entry: Json, header: Json, data: int, *_: Any) -> Any:
    rows, columns = entry["shape"]
    shape = [columns, rows] if rows != columns else [rows * 2, columns // 2]
    return entry | {"shape": shape}, header, data


def _flat(entry: Json, header: Json, data: int, *_: Any) -> Any:
    rows, columns = entry["shape"]
    return entry | {"shape": [rows * columns]}, header, data


def _longer(entry: Json, header: Json, data: int, *_: Any) -> Any:
    start, stop = entry["data_offsets"]
    return entry | {"data_offsets": [start, stop + 2**40]}, header, data


def _without(field: str) -> Callable[..., Any]:
    return lambda entry, header, data, *_: (
        {key: value for key, value in entry.items() if key != field},
        header,
        data,
    )


HEADERS: dict[str, Callable[..., Any]] = {
    "overlap": _moved(-8),
    "gap": _moved(8),
    "negative shape": _shape(-1, 4),
    "absurd shape": _shape(2**31, 2**31),
    "overflowing shape": _shape(2**62, 2**62, 2**62),
    "fractional shape": _shape(1.5),
    "empty shape": _shape(),
    "unknown type": _dtype("F7"),
    "type that is none": _dtype(None),
    "all integers": _integers,
    "integers": _one_of_integers,
    "dropped": _dropped,
    "hole": _hole,
    "renamed": _renamed,
    "layer beyond": _beyond,
    "turned": _turned,
    "flat": _flat,
    "beyond the file": _longer,
    "no shape": _without("shape"),
    "no offsets": _without("data_offsets"),
}


def break_file(folder: Path, random: Random) -> str:
    """The bytes of a file, not what it says."""
    file = random.choice(sorted(folder.glob("*.safetensors")))
    size = file.stat().st_size
    with file.open("rb") as stream:
        begin = stream.read(min(size, 1 << 20))
    kind = random.choice(["cut", "cut header", "empty", "longer", "length", "json", "type"])
    begin, size = {
        "cut": (begin, size - random.randint(1, 1000)),
        "cut header": (begin[: random.randint(1, 200)], 0),
        "empty": (b"", 0),
        "longer": (begin, size + random.randint(1, 1000)),
        "length": (struct.pack("<Q", random.choice([2**63, 2**61, size])) + begin[8:], size),
        "json": (begin[:8] + b"[" + begin[9:], size),
        "type": (struct.pack("<Q", 4) + b"[42]", 12),
    }[kind]
    file.unlink()
    with file.open("wb") as stream:
        stream.write(begin[: size or len(begin)])
        stream.truncate(size or len(begin))
    return f"file {kind}"


def break_index(folder: Path, random: Random) -> str:
    content = json.loads((folder / INDEX).read_text())
    shards = content["weight_map"]
    name = random.choice(sorted(shards))
    kind = random.choice(["no file", "no tensor", "elsewhere", "no map", "a list"])
    changes: dict[str, Any] = {
        "no file": {"weight_map": shards | {name: "model-00099-of-00099.safetensors"}},
        "no tensor": {"weight_map": shards | {"model.layers.1.extra.weight": shards[name]}},
        "elsewhere": {"weight_map": shards | {name: "../" + shards[name]}},
        "no map": {"weight_map": None},
        "a list": {"weight_map": [name]},
    }
    edit(folder, INDEX, **changes[kind])
    return f"index {kind} of {name}"


# --- what is done to a GGUF file --------------------------------------------------------------

COUNTS = (2**61, 2**63, 2**32 + 1, 2**40)


def break_gguf(file: Path, random: Random) -> str:
    data = bytearray(file.read_bytes())

    def put(at: int, form: str, value: Any) -> None:
        struct.pack_into("<" + form, data, at, value)

    def after(name: str) -> int:
        return data.index(name.encode()) + len(name)

    claim = random.choice(COUNTS)
    tensor = random.choice(["blk.0.ffn_up.weight", "blk.2.attn_q.weight", "token_embd.weight"])
    fields = {
        "llama.block_count": ("I", random.choice([0, 2, 9, 2**31])),
        "llama.embedding_length": ("I", random.choice([0, 96, 2**31])),
        "llama.feed_forward_length": ("I", random.choice([0, 7, 2**31])),
        "llama.attention.head_count": ("I", random.choice([0, 5, 2**31])),
        "llama.attention.head_count_kv": ("I", random.choice([0, 1, 2**31])),
        "llama.attention.key_length": ("I", random.choice([0, 8, 2**31])),
        "llama.context_length": ("I", random.choice([0, 2**31])),
        "llama.rope.freq_base": ("f", random.choice([0.0, -1.0, NAN, INF])),
        "llama.attention.layer_norm_rms_epsilon": ("f", random.choice([-1.0, NAN, INF])),
    }
    kind = random.choice(["tensors", "fields", "key", "text", "dims", "shape", "offset", "cut"])
    kind = random.choice([kind, "field"])
    if kind == "tensors":
        put(8, "Q", claim)
    elif kind == "fields":
        put(16, "Q", claim)
    elif kind == "key":
        put(24, "Q", claim)
    elif kind == "text":
        put(after("general.architecture") + 4, "Q", claim)
    elif kind == "dims":
        put(after(tensor), "I", random.choice([5, 2**31]))
    elif kind == "shape":
        put(after(tensor) + 4, "Q", claim)
    elif kind == "offset":
        put(after(tensor) + 4 + 2 * 8 + 4, "Q", claim & ~31)
    elif kind == "cut":
        del data[random.randint(1, len(data) - 1) :]
    else:
        name = random.choice(sorted(fields))
        form, value = fields[name]
        put(after(name) + 4, form, value)
        kind = f"{name}={value}"
    file.write_bytes(data)
    return f"gguf {kind} {claim} {tensor}"


# --- the tests --------------------------------------------------------------------------------


def broken(wholes: dict[str, Path], root: Path) -> Iterator[tuple[str, Path]]:
    """So many broken checkpoints, and how each was broken."""
    folders = [name for name in wholes if name != "gguf"]
    kinds = [break_config, break_header, break_config, break_header, break_file, break_gguf]
    for number, how in zip(range(NUM_BROKEN), itertools.cycle([*kinds, break_index]), strict=False):
        random = Random(number)
        source = random.choice(folders)
        source = {break_gguf: "gguf", break_index: "shards"}.get(how, source)
        path = copied(wholes[source], root / str(number))
        yield f"{number}: {source}, {how(path, random)}", path


def test_two_hundred_broken_checkpoints_are_refused_in_one_sentence_at_once(
    wholes: dict[str, Path], tmp_path: Path
) -> None:
    wrong, longest = [], 0.0
    for what, path in broken(wholes, tmp_path):
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
        if whole.is_file():
            continue
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


CLI = {
    "half a model": {"num_hidden_layers": 8},
    "more layers": {"num_hidden_layers": 17},
    "key-value heads": {"num_key_value_heads": 4},
    "vocabulary": {"vocab_size": 2000},
    "intermediate size": {"intermediate_size": 400},
    "head size": {"head_dim": 64},
    "activation": {"hidden_act": "sillu"},
    "end of text": {"eos_token_id": 10**9},
    "rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "epsilon": {"rms_norm_eps": NAN},
}


def refused(*settings: str) -> tuple[float, int, str, str]:
    """Seconds of computing, exit code, standard output and error of a command with these models.

    Nothing is waited for, so these are the seconds that it lasts where nothing else runs.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pipespec", "generate", "--prompt", "Once", *settings],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, done.returncode, done.stdout, done.stderr


def assert_told_at_once(*settings: str) -> None:
    took, code, out, error = refused(*settings)
    assert (code, out) == (2, ""), error
    assert error.startswith("pipespec: ") and error.count("\n") == 1, error
    assert took < MOST_S, f"{took:.1f} s: {error}"


@pytest.mark.parametrize(
    "what",
    [
        what if index % 3 == 0 else pytest.param(what, marks=pytest.mark.long)
        for index, what in enumerate(CLI)
    ],
)
def test_the_command_ends_at_once_with_one_sentence(tmp_path: Path, what: str) -> None:
    folder = copied(DEMO / "target", tmp_path / "model")
    edit(folder, "config.json", **CLI[what])
    if what == "end of text":
        edit(folder, "generation_config.json", **CLI[what])
    assert_told_at_once(f"model.target={folder}")


@pytest.mark.parametrize(
    "kind",
    [
        *("overlap", "dropped"),
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("all integers", "unknown type", "turned")
        ),
    ],
)
def test_a_broken_header_of_a_draft_ends_the_command_at_once(tmp_path: Path, kind: str) -> None:
    folder = copied(DEMO / "draft", tmp_path / "model")
    file, name = folder / WEIGHTS, "model.layers.1.self_attn.k_proj.weight"
    header, data = read_header(file)
    entry, header, data = HEADERS[kind](header[name], header, data, name, Random(1))
    write_header(file, header if entry is None else header | {name: entry}, data)
    assert_told_at_once(f"model.draft={folder}")
