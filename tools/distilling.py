"""The training data of a draft: the target's distribution, also on the target's own text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pipespec.engine.checkpoint.model_path import resolve
from pipespec.engine.checkpoint.partial_checkpoint import fetch_parts
from pipespec.engine.checkpoint.parts.folder import read_repository
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ModelError
from tools.training import Mix, console, key_of, progress_steps, written

# What `--halve` makes half as large, beside the heads.
WIDTHS = ("hidden_size", "intermediate_size")


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
    """A draft before it has learnt: `layers` of the target, or at random with half its widths.
    Raises SystemExit for a target whose layers are not in `model.layers`."""
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
    return student


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
class OwnText:
    """A target's continuations of beginnings of a corpus: `rows` times `beginning` tokens of it and
    a greedy continuation of `continuation`, so many rows at once."""

    rows: int
    beginning: int
    continuation: int
    at_once: int
    seed: int

    def pieces(
        self, target: PreTrainedModel, mix: Mix, folder: Path, name: str = ""
    ) -> list[np.ndarray]:
        """Arrays int32 `[rows, beginning + continuation]`, which are kept in `folder` for this
        corpus and the target of that name."""
        found = []
        key = key_of(self, name, mix.digest())
        for piece in progress_steps("target text", 0, -(-self.rows // self.at_once)):
            path = folder / f"target_text_{key}_{piece}.npy"
            if not path.exists():
                rng = np.random.default_rng([self.seed, 0, piece])
                rows = min(self.at_once, self.rows - self.at_once * piece)
                heads = mix.windows(rng, rows, self.beginning).to(target.device)
                with torch.autocast(target.device.type, torch.bfloat16):
                    text = continue_greedily(target, heads, self.continuation)
                ids = text.cpu().numpy().astype(np.int32)
                written(path, lambda partial, ids=ids: np.save(partial, ids))
            found.append(np.load(path))
        return found


def read_text(folder: Path, tokenizer: Any, window: int) -> list[np.ndarray]:
    """Token ids of each text file that is longer than a window of so many tokens, except licences
    and those held out (`book_*`)."""
    files = [p for p in sorted(folder.glob("*.txt")) if "LICENSE" not in p.name]
    files = [p for p in files if not p.name.startswith("book_")]
    if not files:
        raise SystemExit(f"{folder} has no text files (*.txt) to learn from; add at least one.")
    found = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > window:
            found.append(ids)
        else:
            said = f"{path} is left out: {len(ids)} tokens are no more than the {window} of a text"
            console.print(said, soft_wrap=True)
    if not found:
        raise SystemExit(
            f"No text file of {folder} has more than {window} tokens; add longer ones."
        )
    return found
