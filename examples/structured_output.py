"""Have the model fill in a form; needs `pip install 'pipespec[grammar]'`.

python examples/structured_output.py [MODEL [DRAFT]]
"""

import json
import sys

from pipespec import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "trade": {"enum": ["king", "miller", "tailor"]},
    },
    "required": ["name", "age", "trade"],
    "additionalProperties": False,
}


def main() -> None:
    form = SamplingParams(max_tokens=100, structured_outputs=StructuredOutputsParams(json=PERSON))
    with LLM(*sys.argv[1:2], draft=sys.argv[2] if len(sys.argv) > 2 else None, stages=2) as llm:
        (output,) = llm.generate("Once upon a time there was a", form)
        print(json.loads(output.text))


main()
