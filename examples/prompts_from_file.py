"""Answer every line of a file at the same time; print each answer once it is there.

python examples/prompts_from_file.py FILE [MODEL [DRAFT]]
"""

import asyncio
import sys
from pathlib import Path

from pipespec import AsyncLLM, SamplingParams

PARAMS = SamplingParams(max_tokens=32)


async def main() -> None:
    file, *models = sys.argv[1:]
    prompts = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line]
    draft = models[1] if len(models) > 1 else None
    async with AsyncLLM(*models[:1], draft=draft, stages=2) as llm:
        for answer in asyncio.as_completed([llm.generate(prompt, PARAMS) for prompt in prompts]):
            (output,) = await answer
            print(f"{output.prompt}|{output.text!r}")


asyncio.run(main())
