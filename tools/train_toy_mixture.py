"""Train a toy mixture of experts, to see how much alike the rows of real batches choose.

    python -m tools.train_toy_mixture --corpus CORPUS --out build/mixture

A `qwen3_moe` of some million parameters with the demo pair's tokenizer, so that the demo draft
drafts for it. It learns the next token of `--corpus` (`tools.demo_text` describes it) and, as
published mixtures do, to use its experts equally often. `--tokens` is the budget; a run that was
killed continues in `--folder`. `benchmarks.budgets.expert_overlap` measures with it; what rests on
it is of a TOY.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipespec.system.folders import resource_dir
from tools.demo_text import CORPUS_NOTES, DEFAULT_NOTE, corpus_files, encode
from tools.training import Budget, Mix, console, train

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
}
# How much using all experts equally often counts beside the next token, as in Switch Transformers
# (2101.03961, section 2.2).
BALANCE = 0.01
LENGTH, BATCH_TOKENS = 256, 8192


def new_mixture(experts: int, chosen: int, vocab_size: int, eos: int) -> Qwen3MoeForCausalLM:
    """A mixture with random weights."""
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=vocab_size,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            pad_token_id=None,
            eos_token_id=eos,
            num_experts=experts,
            num_experts_per_tok=chosen,
            norm_topk_prob=True,
            router_aux_loss_coef=BALANCE,
            **SHAPE,
        )
    )
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos)
    return model


def main() -> None:
    """Train, and write the model with its tokenizer in bfloat16."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.txt")
    parser.add_argument("--out", type=Path, required=True, help="gets the model")
    parser.add_argument("--folder", type=Path, default=Path(".training"), help="checkpoints")
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--experts", type=int, default=32, help="of a layer")
    parser.add_argument("--chosen", type=int, default=4, help="by each row")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resource_dir("demo") / "target")
    files = corpus_files(args.corpus, held_out=False)
    weights = [CORPUS_NOTES.get(path.stem, DEFAULT_NOTE)[0] for path in files]
    mix = Mix.of([encode(tokenizer, path) for path in files], weights)
    torch.manual_seed(args.seed)
    model = new_mixture(args.experts, args.chosen, len(tokenizer), tokenizer.eos_token_id)
    count = sum(each.numel() for each in model.parameters())
    console.print(f"{count:,} parameters, {args.chosen} of {args.experts} experts")

    def loss_of(ids: Tensor, _: float) -> Tensor:
        return model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False).loss

    train(
        f"mixture-{args.experts}-{args.chosen}",
        model,
        mix,
        Budget(args.tokens, BATCH_TOKENS, ((0.0, LENGTH),), args.seed),
        args.folder,
        loss_of,
        checkpoint_every=50,
        log_every=20,
    )
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
