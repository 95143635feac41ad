"""Talk with a model; each answer is printed while it is generated. An empty line ends.

python examples/chat.py [MODEL [DRAFT]]
"""

import sys

from pipespec import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=64, temperature=0.7, repetition_penalty=1.1)


def main() -> None:
    messages: list[dict[str, str]] = []
    with LLM(*sys.argv[1:2], draft=sys.argv[2] if len(sys.argv) > 2 else None, stages=2) as llm:
        while question := input("> "):
            messages.append({"role": "user", "content": question})
            answer = ""
            for piece in llm.stream_chat(messages, PARAMS):
                print(piece, end="", flush=True)
                answer += piece
            print()
            messages.append({"role": "assistant", "content": answer})


main()
