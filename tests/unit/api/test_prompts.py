import pytest

from pipespec.api.prompts import tokenize_chats, tokenize_prompts
from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.errors import PromptError

CONTEXT = 64
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model() -> ModelInfo:
    return ModelInfo.of(decide(compose([f"model.context={CONTEXT}"])))


def test_texts_and_token_ids_may_be_one_or_many(model):
    (text,) = tokenize_prompts(model, "Once upon a time")
    assert text.text == "Once upon a time"
    ids = list(text.token_ids)
    assert ids == model.encode("Once upon a time")
    assert [one.token_ids for one in tokenize_prompts(model, ids)] == [tuple(ids)]
    many = tokenize_prompts(model, ["Once", ids])
    assert [one.text for one in many] == ["Once", None]


def test_a_conversation_is_rendered_by_the_chat_template(model):
    (one,) = tokenize_chats(model, HELLO)
    assert one.text == model.render(HELLO)
    assert tokenize_chats(model, [HELLO, HELLO]) == [one, one]


@pytest.mark.parametrize(
    ("tokenize", "given", "said"),
    [
        (tokenize_prompts, "", "The prompt is empty"),
        (tokenize_prompts, [], "There is no prompt"),
        (tokenize_prompts, ["Once", ""], "The prompt is empty"),
        (tokenize_prompts, 7, "There is no prompt"),
        (tokenize_prompts, [7.5], "A prompt is 7.5, but must be a text or a list of token ids"),
        (tokenize_prompts, [10**6], "the token id 1000000, but they go from 0 to"),
        (tokenize_prompts, [1] * CONTEXT, f"has {CONTEXT} tokens, but the context holds {CONTEXT}"),
        (tokenize_prompts, "king " * 100, "tokens, but the context holds"),
        (tokenize_chats, "Hello", "There is no message"),
        (tokenize_chats, [], "There is no message"),
        (tokenize_chats, [{"content": "Hello"}], "must be a list of messages"),
        (tokenize_chats, [["Hello"]], "must be a list of messages"),
    ],
)
def test_what_cannot_be_used_is_refused(model, tokenize, given, said):
    with pytest.raises(PromptError, match=said):
        tokenize(model, given)
