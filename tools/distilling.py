"""The training data of a draft: the target's distribution, also on the target's own text, which it
writes for this or has written for users."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from rich.progress import track
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedConfig, PreTrainedModel

from pipespec.engine.checkpoint.model_path import resolve
from pipespec.engine.checkpoint.partial_checkpoint import fetch_parts
from pipespec.engine.checkpoint.parts.folder import read_repository
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ModelError
from pipespec.head.proposer import Context, ProposalRequest
from pipespec.head.proposers.suffix import SuffixConfig, SuffixProposer
from pipespec.head.tree import ROOT, Tree
from pipespec.server.answer_record import FILES
from pipespec.system.validation import Unreadable, from_fields, parse_json
from tools.training import Mix, console, key_of, written

# What `--halve` makes half as large, beside the heads.
WIDTHS = ("hidden_size", "intermediate_size")
# Tokens of the beginnings that the target continues, and how many of these at once.
BEGINNING, ROWS_AT_ONCE = 64, 64


def model_folder(model: str) -> Path:
    """The folder of a model with all weights, named by its folder or hub id. Raises SystemExit."""
    try:
        path = resolve(model)
        if read_repository(path) is not None:
            info = inspect(path)
            fetch_parts(path, parts_of(range(info.num_layers), info.num_layers, tied=info.tied))
        return path
    except ModelError as error:
        raise SystemExit(f"{str(error)[0].upper()}{str(error)[1:]}.") from error


def read(kind: Any, path: Path, **options: Any) -> Any:
    """`kind.from_pretrained` of a model's folder or GGUF file."""
    if path.is_dir():
        return kind.from_pretrained(path, **options)
    return kind.from_pretrained(path.parent, gguf_file=path.name, **options)


def load_target(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A target to learn from, of a GGUF file with dequantised weights."""
    options = {} if path.is_dir() else {"quantization_config": GgufConfig(dequantize=True)}
    model = read(AutoModelForCausalLM, path, dtype=dtype, **options)
    return model.eval().requires_grad_(False)


def kept_layers(count: int, wanted: int) -> list[int]:
    """So many of the target's layers, the first and the last among them."""
    if not 1 <= wanted <= count:
        raise SystemExit(f"The target has {count} layers; give --layers from 1 to {count}.")
    return np.linspace(0, count - 1, wanted).round().astype(int).tolist()


def config_of(target: PreTrainedConfig, layers: list[int], *, halve: bool) -> PreTrainedConfig:
    """The configuration of a draft."""
    values = target.to_dict()
    values["num_hidden_layers"] = len(layers)
    if isinstance(values.get("layer_types"), list):
        values["layer_types"] = [values["layer_types"][layer] for layer in layers]
    if halve:
        head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        values |= {name: values[name] // 2 for name in WIDTHS}
        values |= _half_the_heads(values) | {"head_dim": head}
    return type(target)(**values)


def _half_the_heads(values: Mapping[str, Any]) -> dict[str, int]:
    """With as many query heads for each head of K and V, unless there is one such head."""
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    if kv_heads == 1:
        return {"num_attention_heads": max(1, heads // 2)}
    kept = kv_heads // 2
    found = {"num_attention_heads": kept * (heads // kv_heads), "num_key_value_heads": kept}
    return {name: count for name, count in found.items() if name in values}


def student_of(target: PreTrainedModel, layers: list[int], *, halve: bool) -> PreTrainedModel:
    """A draft before it has learnt: `layers` of the target, between its embeddings and output head,
    which stay as they are; or at random with half its widths. Raises SystemExit for a target whose
    layers are not in `model.layers`."""
    if not hasattr(getattr(target, "model", None), "layers"):
        raise SystemExit(
            f"Layers of a {target.config.model_type} cannot be left out; take a Llama."
        )
    student = AutoModelForCausalLM.from_config(config_of(target.config, layers, halve=halve))
    student = student.to(torch.float32)
    if not halve:
        place = {old: new for new, old in enumerate(layers)}
        weights = {}
        for name, value in target.state_dict().items():
            before, found, after = name.partition(".layers.")
            number, _, rest = after.partition(".")
            if not found:
                weights[name] = value
            elif int(number) in place:
                weights[f"{before}.layers.{place[int(number)]}.{rest}"] = value
        student.load_state_dict(weights)
        for kept in (student.get_input_embeddings(), student.get_output_embeddings()):
            kept.requires_grad_(False)
    return student


def saying(model: PreTrainedModel, tokens: Tensor) -> PreTrainedModel:
    """The model with logits of these tokens alone; all other weights are those of `model`."""
    whole = model.get_output_embeddings()
    part, found = copy.copy(whole), copy.copy(model)
    part._parameters = {
        name: None if each is None else nn.Parameter(each[tokens], requires_grad=False)
        for name, each in whole._parameters.items()
    }
    modules = model.named_children()
    found._modules = {name: part if each is whole else each for name, each in modules}
    return found


def kl_loss(
    target: PreTrainedModel, student: PreTrainedModel, ids: Tensor, progress: float
) -> Tensor:
    """The loss of a student on windows `[rows, length]` at a progress in [0, 1).

    KL(target || student), plus cross entropy to the target's greedy choice, which is what
    verification rewards. That enters late, when the student already knows the distribution.
    """
    with torch.no_grad():
        wanted = target(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
    logits = student(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
    ours, theirs = F.log_softmax(logits, -1), F.log_softmax(wanted, -1)
    kl = F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return kl + max(0.0, 2 * progress - 1) * F.cross_entropy(logits, wanted.argmax(-1))


@torch.inference_mode()
def continue_greedily(model: PreTrainedModel, ids: Tensor, num_new: int) -> Tensor:
    """Greedy continuation that runs through end tokens: `[rows, n]` -> `[rows, n + num_new]`."""
    out = model(input_ids=ids, use_cache=True)
    tokens = [ids, out.logits[:, -1:].argmax(-1)]
    while len(tokens) <= num_new:
        out = model(input_ids=tokens[-1], past_key_values=out.past_key_values, use_cache=True)
        tokens.append(out.logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)


@dataclass(frozen=True)
class Text:
    """Token ids `[tokens]`, of which those from `begin` on are the target's own."""

    ids: np.ndarray
    begin: int


def own_text(
    target: PreTrainedModel, mix: Mix, rows: int, length: int, seed: int, folder: Path, name: str
) -> list[Text]:
    """So many greedy continuations of a target, of `length` tokens behind beginnings of a corpus,
    which are kept in `folder` for this corpus and the target of that name."""
    found = []
    key = key_of(rows, BEGINNING, length, seed, name, mix.digest())
    for piece in track(range(-(-rows // ROWS_AT_ONCE)), "target text", console=console):
        path = folder / f"target_text_{key}_{piece}.npy"
        if not path.exists():
            rng = np.random.default_rng([seed, 0, piece])
            count = min(ROWS_AT_ONCE, rows - ROWS_AT_ONCE * piece)
            heads = mix.windows(rng, count, BEGINNING).to(target.device)
            with torch.autocast(target.device.type, torch.bfloat16):
                text = continue_greedily(target, heads, length)
            ids = text.cpu().numpy().astype(np.int32)
            written(path, lambda partial, ids=ids: np.save(partial, ids))
        found += [Text(row, BEGINNING) for row in np.load(path)]
    return found


@dataclass(frozen=True)
class KeptAnswer:
    """A line of what `pipespec serve` keeps (`pipespec/server/answer_record.py`)."""

    target: str
    prompt: Sequence[int]
    answer: Sequence[int]


def kept_answers(folder: Path, target: str) -> list[Text]:
    """The answers of a target that `pipespec serve` has kept, the oldest first; of a conversation
    the last, which has all of it. Raises SystemExit."""
    found: dict[bytes, Text] = {}
    for file in sorted(folder.glob(FILES)):
        for line in file.read_text(encoding="ascii").splitlines():
            with suppress(Unreadable):  # the last line of a server that was killed
                kept = from_fields(KeptAnswer, parse_json(line))
                if kept.target == target and kept.prompt:
                    ids = np.array([*kept.prompt, *kept.answer], np.int32)
                    found[ids.tobytes()] = Text(ids, len(kept.prompt))
    for shorter, longer in pairwise(sorted(found)):
        if longer.startswith(shorter):
            del found[shorter]
    if len(found) < 2:
        raise SystemExit(f"{folder} has {len(found)} answers of {target}, but 2 are needed.")
    return [*found.values()]


def suffix_ranks(learnt: Sequence[Text], texts: Sequence[Text], most: int) -> np.ndarray:
    """The rank of each token of the texts' own part among what the suffix proposer proposes, which
    has seen the answers before it; `most` + 1: not among so many."""
    proposer = SuffixProposer(SuffixConfig().past)
    ranks = []
    for number, text in enumerate([*learnt, *texts]):
        ids, begin = text.ids.tolist(), text.begin
        new = number >= len(learnt)
        count = begin if new else len(ids)
        context = Context(number, ids[:count], list(range(count)), prompt_len=begin)
        proposer.start_sequence(context)
        for position in range(count, len(ids)):
            tree = Tree(position - 1, position - 2, ids[position - 1], position - 1, fed=True)
            request = ProposalRequest(context, tree, np.array([ROOT]))
            while (found := proposer.propose([request], most)[0]) is None:
                pass  # it reads the prompt
            token, proposed = ids[position], found.tokens[0][np.isfinite(found.logps[0])].tolist()
            ranks.append(1 + (proposed.index(token) if token in proposed else most))
            context.tokens.append(token)
            context.nodes.append(position)
        proposer.end_sequence(number)
        proposer.past.read(len(ids))
    return np.array(ranks)


def read_text(folder: Path, tokenizer: Any, window: int) -> np.ndarray:
    """Token ids of all text files, one after another, except licences and those held out
    (`book_*`). Raises SystemExit if they are not more than `window`."""
    files = [p for p in sorted(folder.glob("*.txt")) if "LICENSE" not in p.name]
    texts = (p.read_text(encoding="utf-8") for p in files if not p.name.startswith("book_"))
    found = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in texts]
    ids = np.concatenate([np.zeros(0, np.int64), *found]).astype(np.int64)
    if len(ids) <= window:
        raise SystemExit(
            f"The text files (*.txt) of {folder} have {len(ids)} tokens, of which more than "
            f"{window} are needed; add some."
        )
    return ids
