"""Continue some prompts with a model; without arguments with the demo pair.

python examples/generate.py [MODEL [DRAFT]]
"""

import sys

from pipespec import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The king had three sons, and"]


def main() -> None:
    with LLM(*sys.argv[1:2], draft=sys.argv[2] if len(sys.argv) > 2 else None, stages=2) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(max_tokens=32)):
            print(f"{output.prompt}|{output.text}")
            print(f"  {output.metrics['tokens_per_step']:.2f} tokens per step")


main()
