"""Decode with a speculation policy of your own, and compare it with the built-in one.

The ranks import the policy's module, so it is a file of its own (`chain_policy.py`) in the folder
in which you run this:

cd examples; python own_policy.py
"""

from chain_policy import Chain

from pipespec import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=32)


def main() -> None:
    texts = []
    for options in ({"policy": Chain(length=6)}, {}):
        with LLM(stages=2, **options) as llm:
            (output,) = llm.generate("Once upon a time", PARAMS)
        print(f"{output.metrics['tokens_per_step']:.2f} tokens per step: {output.text!r}")
        texts.append(output.text)
    assert texts[0] == texts[1], "a policy never changes the text"


main()
