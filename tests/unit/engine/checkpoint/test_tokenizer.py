"""Tokenizers without Transformers: the ids, texts and chats that Transformers makes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, ByT5Tokenizer

from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir

DEMO = resource_dir("demo")
THEIRS = AutoTokenizer.from_pretrained(DEMO / "target")
OURS = tokenizer.load(DEMO / "target")


@given(st.text(max_size=60), st.booleans())
def test_ids_and_texts_are_those_of_transformers(text, special):
    ids = OURS.encode(text, add_special_tokens=special)
    assert ids == THEIRS.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert OURS.decode(ids, skip_special_tokens=skip) == THEIRS.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    assert [OURS.convert_ids_to_tokens(i) for i in ids] == THEIRS.convert_ids_to_tokens(ids)


def test_the_vocabulary_is_that_of_transformers_and_an_id_without_token_is_none():
    assert OURS.get_vocab() == THEIRS.get_vocab()
    beyond = max(THEIRS.get_vocab().values()) + 1
    assert OURS.convert_ids_to_tokens(beyond) is None
    assert OURS.decode([beyond]) == ""


TEMPLATES = [
    THEIRS.chat_template,
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}",
    "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ tools }}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "{% if add_generation_prompt %}go{% endif %}{{ eos_token }}",
    "{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", ["Hello", "a <b> & 'c' é"])
def test_a_chat_reads_as_with_transformers(template, prompt):
    messages = [{"role": "user", "content": prompt}]
    expected = THEIRS.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    found = OURS.apply_chat_template(messages, chat_template=template, add_generation_prompt=True)
    assert found == expected


def test_a_template_can_refuse():
    with pytest.raises(Exception, match="only for poets"):
        OURS.apply_chat_template([], chat_template="{{ raise_exception('only for poets') }}")


def test_the_second_reading_needs_no_transformers(model):
    """Nor torch; a changed file is read anew."""
    tokenizer.load(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").write_text("{{ 'changed' }}")
    settings["nothing"] = str(model)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer.load(model).chat_template == "{{ 'changed' }}"
    script = (
        "import sys; from pathlib import Path; from pipespec.engine.checkpoint import tokenizer\n"
        f"print(tokenizer.load(Path({str(model)!r})).chat_template)\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines() == ["{{ 'changed' }}", ""]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO / "target", tmp_path / "model"))


def refusal(model: Path) -> str:
    with pytest.raises(ModelError) as caught:
        tokenizer.load(model)
    message = str(caught.value)
    assert str(model) in message and "\n" not in message
    return message


@pytest.mark.parametrize("keep", [(), ("tokenizer_config.json",)])
def test_a_folder_without_tokenizer_names_what_is_missing(model, keep):
    for name in {"tokenizer.json", "tokenizer_config.json"} - set(keep):
        (model / name).unlink()
    assert "holds no tokenizer: tokenizer.json, or" in refusal(model)
    with pytest.raises(ModelError, match="holds no tokenizer"):  # before Transformers is imported
        open_files(model).require_tokenizer()


WHOLE = (DEMO / "target" / "tokenizer.json").read_bytes()
NONE = (b"", b"\xff\xfe\x00", b"{}", b"[]", b"null", b'{"added_tokens": []}', b'{"version": "9.9"}')


@pytest.mark.parametrize("content", [*NONE, WHOLE[: len(WHOLE) // 2]])
def test_a_tokenizer_that_is_none(model, content):
    (model / "tokenizer.json").write_bytes(content)
    assert "cannot be used" in refusal(model)
    with pytest.raises(ModelError, match="cannot be used"):  # before Transformers is imported
        open_files(model).require_tokenizer()


def test_a_tokenizer_without_tokens(model):
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    content["added_tokens"] = []
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert "it has no tokens" in refusal(model)


def test_a_tokenizer_that_is_none_of_the_package_tokenizers_is_refused(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").touch()
    assert "ByT5Tokenizer is none of the package tokenizers" in refusal(tmp_path)
