"""The demo models' text: the corpus and its licences, the tokenizer, the chat template.

The corpus is a folder of text files whose documents are separated by a line `<|endoftext|>`. Files
named `book_*` are held out: no step but the evaluation reads them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"
VOCAB_SIZE = 2048
CODE_BENCHMARKS = ("HumanEval", "HumanEval-X")  # continued as they are; the others are questions

# Words keep their leading space; digits are separate, so that numbers of any length look alike.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A user turn reads as a problem of the arithmetic corpus, the only question-and-answer text seen.
# Calls of tools are as `tool_choice: required` has them written.
CHAT_TEMPLATE = (
    "{% if tools %}Functions: {{ tools | tojson }}\n\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' and message['tool_calls'] %}Answer: ["
    "{% for call in message['tool_calls'] %}{{ call['function'] | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% elif message['role'] == 'assistant' %}"
    "Answer: {{ message['content'] | trim }}{{ eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] | trim }}\n\n"
    "{% elif message['role'] == 'tool' %}Result: {{ message['content'] | trim }}\n"
    "{% else %}Question: {{ message['content'] | trim }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)

# How often a file is read relative to its size, and what the model card says about it.
CORPUS_NOTES = {
    "childrens_books": (
        1.0,
        "58 children's books of Project Gutenberg (GITenberg)",
        "public domain (US)",
    ),
    "gsm8k_train": (2.0, "GSM8K, training split (openai/grade-school-math)", "MIT"),
    "python_stdlib": (1.0, "CPython 3.11.7 standard library, without tests", "PSF-2.0"),
    "tinyshakespeare": (2.0, "Tiny Shakespeare (karpathy/char-rnn)", "public domain"),
}
DEFAULT_NOTE = (1.0, "supplied by the user", "see its origin")


def corpus_files(folder: Path, held_out: bool) -> list[Path]:
    """Text files to train on, or those held out (`book_*`); licence texts are neither."""
    files = [p for p in sorted(folder.glob("*.txt")) if "LICENSE" not in p.name]
    files = [p for p in files if p.name.startswith("book_") == held_out]
    if not files:
        kind = "held-out text files (book_*.txt)" if held_out else "text files to train on"
        raise SystemExit(f"{folder} has no {kind}; add at least one.")
    return files


def documents(path: Path) -> list[str]:
    parts = path.read_text(encoding="utf-8").split(f"\n{EOS}\n")
    return [part.strip("\n") for part in parts if part.strip()]


def train_tokenizer(files: list[Path]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator((doc for path in files for doc in documents(path)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, path: Path) -> np.ndarray:
    """The file as one stream of token ids `[tokens]`, each document closed by the end token."""
    encodings = tokenizer.backend_tokenizer.encode_batch(documents(path), add_special_tokens=False)
    return np.concatenate([np.array([*e.ids, tokenizer.eos_token_id], np.int32) for e in encodings])
