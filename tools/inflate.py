"""Grow a Llama checkpoint to any size; its answers stay the same.

    python -m tools.inflate OUT --hidden 1024 --layers 32 --intermediate 4096
    python -m tools.inflate OUT --parameters 500M --dtype bfloat16

OUT is an ordinary Hugging Face Llama checkpoint with the tokenizer of `--model` (the demo
target), so any engine runs it at the cost of its size, and a draft keeps its accuracy.

Why the function stays the same, for a model of width d in one of width D:

- The new D - d numbers of the hidden state are zero, since nothing that writes the hidden state
  (embedding, o_proj, down_proj) writes there.
- RMSNorm divides by sqrt(s/d + eps), s the sum of squares. Over D numbers it divides by
  sqrt(s/D + eps'), which with eps' = eps·d/D is the same times sqrt(d/D); so the norm's weights
  are multiplied by sqrt(d/D).
- New heads and new intermediate units are read with weight zero. Heads keep their size and the
  number of query heads per KV head, so the old heads keep their partners.
- A new layer is a copy of the layer before it whose o_proj and down_proj are zero.

Only weights that write must be zero. Weights that read the zeros (the new columns of q, k, v, gate,
up and of an untied head), and those whose results are not read, are random of the usual size: every
engine computes real heads and units, and multiplies no denormal numbers. Engines compute densely
and gain nothing from the zeros. In float32 tokens are equal but for rounding; in bfloat16 the
scaled norms are exact where D/d is a power of 4.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipespec.errors import ConfigError, ModelError
from pipespec.system.folders import resource_dir

# The usual standard deviation of a Llama's initial weights.
SPREAD = 0.02
# Weights that write the hidden state.
WRITERS = ("embed_tokens", "o_proj", "down_proj")
# Layers of a model that is given by its number of parameters: one per so many of its width.
WIDTH_PER_LAYER = 64
# The tokenizer and the generation settings; files that exist already are kept.
COPIED = (".json", ".jinja", ".model", ".txt")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class Shape:
    """The size of a Llama."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """The shape in a Llama's config.json."""
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
        )

    @property
    def num_parameters(self) -> int:
        """Weights without biases."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    def grow(self, hidden: int, layers: int, intermediate: int) -> Shape:
        """This model, larger, with as many heads as fit. Raises ConfigError."""
        sizes = {"hidden": hidden, "layers": layers, "intermediate": intermediate}
        for name, size in sizes.items():
            if size < getattr(self, name):
                raise ConfigError(
                    f"--{name} is {size}, but must be at least {getattr(self, name)}, as in the "
                    "model that is to grow."
                )
        group = self.heads // self.kv_heads
        most = max(self.heads, hidden // self.head_dim)
        for heads in range(most // group * group, self.heads - 1, -group):
            if hidden % heads == 0:  # as Hugging Face wants it
                larger = replace(self, hidden=hidden, layers=layers, intermediate=intermediate)
                return replace(larger, heads=heads, kv_heads=heads // group)
        raise ConfigError(
            f"--hidden is {hidden}, but must be divisible by a number of heads from {self.heads} "
            f"up in steps of {group}; {self.heads * math.ceil(hidden / self.heads)} would do."
        )

    def grow_to(self, parameters: int) -> Shape:
        """This model with about so many parameters, in usual proportions. Raises ConfigError."""
        if parameters < self.num_parameters:
            raise ConfigError(
                f"--parameters is {parameters}, but must be at least {self.num_parameters}, as in "
                "the model that is to grow."
            )
        step = self.head_dim * self.heads // self.kv_heads
        best = self
        for hidden in range(math.ceil(self.hidden / step) * step, parameters, step):
            wider = self.grow(
                hidden,
                max(self.layers, hidden // WIDTH_PER_LAYER),
                max(self.intermediate, self.intermediate * hidden // self.hidden),
            )
            if wider.num_parameters > parameters:
                break
            best = wider
        missing = (parameters - best.num_parameters) / (3 * best.hidden * best.layers)
        units = max(best.intermediate, round(best.intermediate + missing) // step * step)
        return replace(best, intermediate=units)


def inflate(weights: Mapping[str, Tensor], old: Shape, new: Shape) -> Iterator[dict[str, Tensor]]:
    """The larger model in float32, in pieces: its embeddings and last norm, then layer by layer.
    The seeds of the random weights are fixed."""
    outside = {name: weight for name, weight in weights.items() if ".layers." not in name}
    yield _grown(outside, old, new, seed=0)
    for number in range(new.layers):
        source = number * old.layers // new.layers
        copied = number > 0 and (number - 1) * old.layers // new.layers == source
        prefix, renamed = f"model.layers.{source}.", f"model.layers.{number}."
        layer = {
            renamed + name.removeprefix(prefix): torch.zeros_like(weight)
            if copied and _writes(name)
            else weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        yield _grown(layer, old, new, seed=number + 1)


def _writes(name: str) -> bool:
    return any(f".{writer}." in name for writer in WRITERS)


def _grown(weights: Mapping[str, Tensor], old: Shape, new: Shape, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grown = {}
    for name, weight in sorted(weights.items()):
        whole = torch.zeros(_sizes(name, new)[: weight.ndim])
        if "norm" in name:
            whole.fill_(1.0)
            weight = weight * math.sqrt(old.hidden / new.hidden)
        elif weight.ndim > 1 and not _writes(name):
            whole.normal_(0.0, SPREAD, generator=generator)
        whole[tuple(slice(size) for size in weight.shape)] = weight
        grown[name] = whole
    return grown


def _sizes(name: str, shape: Shape) -> tuple[int, ...]:
    """Rows and columns of a weight; a norm and a bias have the rows alone."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, units = shape.hidden, shape.intermediate
    sizes = {
        "embed_tokens": (shape.vocab, hidden),
        "lm_head": (shape.vocab, hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (units, hidden),
        "up_proj": (units, hidden),
        "down_proj": (hidden, units),
    }
    return sizes.get(name.split(".")[-2], (hidden,))


# --- folders ----------------------------------------------------------------------------------


def read_config(model: Path) -> dict[str, Any]:
    """config.json of a Llama checkpoint. Raises ModelError."""
    path = model / "config.json"
    if not path.is_file():
        raise ModelError(f"{model} holds no config.json, but must be a model folder.")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if config.get("model_type") != "llama":
        raise ModelError(
            f"{model} is a {config.get('model_type')} model, but only a Llama can be inflated."
        )
    return config


def write(model: Path, out: Path, new: Shape, dtype: torch.dtype) -> None:
    """Inflate the checkpoint `model` into the new or empty folder `out`.

    One safetensors file per piece, so that no more than one piece is in memory.
    Raises ConfigError.
    """
    config = read_config(model)
    old = Shape.of(config)
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; name a new folder.")
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(model.glob("*.safetensors"))
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    where: dict[str, str] = {}
    num_bytes = 0
    for number, piece in enumerate(inflate(weights, old, new), 1):
        file = f"model-{number:05d}-of-{new.layers + 1:05d}.safetensors"
        cast = {name: weight.to(dtype).contiguous() for name, weight in piece.items()}
        save_file(cast, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(cast, file)
        num_bytes += sum(weight.nbytes for weight in cast.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": where}
    _write_json(out / "model.safetensors.index.json", index)
    sizes = {
        "hidden_size": new.hidden,
        "num_hidden_layers": new.layers,
        "intermediate_size": new.intermediate,
        "num_attention_heads": new.heads,
        "num_key_value_heads": new.kv_heads,
        "head_dim": new.head_dim,
        "rms_norm_eps": config["rms_norm_eps"] * old.hidden / new.hidden,
        "dtype": str(dtype).removeprefix("torch."),
    }
    config.pop("torch_dtype", None)
    _write_json(out / "config.json", config | sizes)
    for other in model.iterdir():
        if other.suffix in COPIED and not (out / other.name).exists():
            shutil.copyfile(other, out / other.name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def number_of(text: str) -> int:
    """A number with K, M or B behind it, as in 500M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 500M or 1.5B")
    return round(float(match[1]) * UNITS[match[2]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--model", type=Path, default=resource_dir("demo") / "target")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--parameters", type=number_of, help="about so many, instead: 500M, 1.5B")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    try:
        old = Shape.of(read_config(args.model))
        sizes = (args.hidden, args.layers, args.intermediate)
        if args.parameters is None:
            own = (old.hidden, old.layers, old.intermediate)
            chosen = zip(sizes, own, strict=True)
            new = old.grow(*(size if option is None else option for option, size in chosen))
        elif any(size is not None for size in sizes):
            raise ConfigError("--parameters chooses the whole shape; give it alone.")
        else:
            new = old.grow_to(args.parameters)
        write(args.model, args.out, new, getattr(torch, args.dtype))
    except ConfigError as error:
        parser.error(str(error))
    print(
        f"{args.out}: {new.num_parameters / 1e6:.1f} million parameters, {new.layers} layers, "
        f"hidden {new.hidden}, intermediate {new.intermediate}, heads {new.heads}/{new.kv_heads}"
    )


if __name__ == "__main__":
    main()
