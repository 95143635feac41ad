"""A chat template is a program of somebody else's: whatever it does is a sentence."""

import json
import shutil
from pathlib import Path

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resource_dir("demo") / "target", tmp_path / "target"))


def encoded(target: Path, template: str, prompt: str = "Hello") -> str:
    """The prompt as the tokenizer was given it."""
    (target / "chat_template.jinja").unlink()
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    config = compose([f"model.target={target}", "proposer=suffix", "decode.chat=true"])
    served = ModelInfo.of(decide(config))
    return served.tokenizer.decode(served.encode(prompt, chat=True))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('only for poets') }}", "TemplateError: only for poets"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("\ud800", "what it makes is no text"),
    ],
)
def test_a_template_that_fails_is_one_sentence(target: Path, template: str, why: str) -> None:
    with pytest.raises(ModelError) as refused:
        encoded(target, template)
    message = str(refused.value)
    assert message.startswith(f"The chat template of {target} fails ({why}")
    assert message.endswith("correct it, or leave --chat out.")
    assert "\n" not in message
