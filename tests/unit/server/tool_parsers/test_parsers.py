"""Calls of tools, read out of what models of each family write, wherever it is cut."""

import json
from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.server.tool_parsers.declared import MAX_VALUE, Declared
from pipespec.server.tool_parsers.families import FAMILIES, ForcedJson, family_for_template
from pipespec.server.tool_parsers.tool_parser import MAX_LENGTH, Piece, merged

Call = tuple[str, str]
PARSERS = {**FAMILIES, "required": ForcedJson}
# Brackets, braces, quotes and markers within strings; letters beyond ASCII; all kinds of values.
HARD = (
    r'{"a": {"b": [1, -2.5e3, {"c": null}], "d": true}, "e": "}] \"quoted\" \\", '
    r'"é": "日本 😀 </tool_call> [TOOL_CALLS] ;", "f": "\u00e9\n"}'
)
ODD = "é <x> \n</para"
NESTED = '{"points": [[1, 2], [3, 4]], "of": {}}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return f"[TOOL_CALLS][{', '.join(objects)}]"


def qwen_coder(name: str, **arguments: str) -> str:
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def minimax(*calls: tuple[str, dict[str, str]]) -> str:
    texts = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    ]
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def glm(name: str, **arguments: str) -> str:
    values = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def deepseek(*calls: Call) -> str:
    texts = [f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{a}<｜tool▁call▁end｜>" for n, a in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"


def deepseek_block(*calls: Call) -> str:
    texts = [f"```json\n{a}\n```" for _, a in calls]
    return deepseek(
        *(("function", f"{n}\n{text}") for (n, _), text in zip(calls, texts, strict=True))
    )


def kimi(*calls: Call) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


F, G = ("f", "{}"), ("g", "{}")
F_HARD, F_NESTED, G_NESTED = ("f", HARD), ("f", NESTED), ("g", NESTED)
# By family: what a model writes, what of it is the message, and its calls. One whose name was
# returned stays a call, as far as it came.
CANNED: dict[str, list[tuple[str, str, list[Call]]]] = {
    "hermes": [
        ("Just text.\n", "Just text.\n", []),
        ("", "", []),
        (hermes(*F_HARD), "", [F_HARD]),
        (f"I look.\n\n{hermes(*F)}\n", "I look.", [F]),
        (f"{hermes(*F_HARD)}\n{hermes(*G_NESTED)}{hermes(*F)}", "", [F_HARD, G_NESTED, F]),
        (f"A {hermes(*F)}\n B ", "A\n B ", [F]),
        ('<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', "", [("f", '{"a":1}')]),
        (r'<tool_call>{"id": [1, {}], "s": "\"}", "name": "f", "arguments": {}, "x": 2}', "", [F]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [F]),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool_c', "", [F]),
        ('<tool_call>{"name": "f", "arguments": {}', "", [F]),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1}} more', "}} more", [("f", '{"a": [1')]),
    ],
    "required": [
        (f'[{{"name":"f","arguments":{HARD}}}]', "", [F_HARD]),
        (
            f'[{{"name":"f","arguments":{{}}}},{{"name":"g","arguments":{NESTED}}}]',
            "",
            [F, G_NESTED],
        ),
        ('[{"name":"f","arguments":{"a":"b', "", [("f", '{"a":"b')]),
        ('[{"name":"f","argum', "", []),
        ('[{"name":"f","arguments":{}},{"name":"g","', "", [F]),
    ],
    "llama3_json": [
        ("int main() { return {1}; }", "int main() { return {1}; }", []),
        (llama(*F_HARD), "", [F_HARD]),
        (f"<|python_tag|>{llama(*F_HARD)}", "", [F_HARD]),
        (f"Let me see. <|python_tag|> {llama(*F)}", "Let me see.", [F]),
        (
            f"{llama(*F_NESTED)}; {llama(*G)};<|python_tag|>{llama('h', HARD)};\n",
            "",
            [F_NESTED, G, ("h", HARD)],
        ),
        ('{"type": "function", "name": "f", "arguments": {}}', "", [F]),
        (f"{{ {llama(*F)}", "{", [F]),
        ('{"a": [1, {"b": 2}]} done; yes', '{"a": [1, {"b": 2}]} done; yes', []),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ],
    "openai": [("Just text.", "Just text.", [])],
    "qwen3_coder": [
        (qwen_coder("f"), "", [F]),
        (
            f"Hm.\n{qwen_coder('f', a='1', b=ODD, c='[1, {}]')}\n{qwen_coder('g.h', text='12')}\n",
            "Hm.",
            [("f", '{"a": 1, "b": "é <x> \\n</para", "c": [1, {}]}'), ("g.h", '{"text": "12"}')],
        ),
        ("<tool_call>\n<function=f>\n<parameter=a>1</par", "", [("f", "")]),
        # Two functions in one, and one without the opening tag.
        (qwen_coder("f").replace("</tool_call>", "") + qwen_coder("g")[12:], "", [F, ("g", "{}")]),
        ("<tool_call><function=f><parameter=a>NaN</parameter>", "", [("f", '{"a": "NaN"')]),
    ],
    "seed_oss": [
        (
            f"I look.\n{qwen_coder('f', a='1')}".replace("tool_call>", "seed:tool_call>"),
            "I look.",
            [("f", '{"a": 1}')],
        )
    ],
    "minimax_m2": [
        (
            f"Hm.\n{minimax(('f', {'a': '[1]', 'b': ODD}), ('g', {'text': '12'}), ('h', {}))}\n",
            "Hm.",
            [("f", '{"a": [1], "b": "é <x> \\n</para"}'), ("g", '{"text": "12"}'), ("h", "{}")],
        )
    ],
    "glm45": [
        (glm("f"), "", [F]),
        (
            f"I look.{glm('f', a='-2.5', b='two words', c='null')}{glm('g', text='12')}",
            "I look.",
            [("f", '{"a": -2.5, "b": "two words", "c": null}'), ("g", '{"text": "12"}')],
        ),
        ("<tool_call>f\n<arg_key>a</arg_key>", "", [("f", "")]),
        (glm("f", a="\nx = 1\n\n"), "", [("f", r'{"a": "\nx = 1\n\n"}')]),
    ],
    "deepseek_v3": [
        (deepseek(F_HARD, G), "", [F_HARD, G]),
        (f"I look. {deepseek_block(F_NESTED, ('g', HARD))}", "I look.", [F_NESTED, ("g", HARD)]),
        (deepseek(("f", '{"a": 1')).partition(": 1")[0], "", [("f", '{"a"')]),
    ],
    "kimi_k2": [
        (kimi(F_HARD, ("g.x", "{}")), "", [F_HARD, ("g.x", "{}")]),
        (f"Hm.{kimi(F_NESTED)} Done.", "Hm. Done.", [F_NESTED]),
    ],
    "llama4_pythonic": [
        ("[f()]", "", [F]),
        (
            "Hm. <|python_start|>[f(a='it\\'s', b=[1, {'c': None}]), g(e=-2.5,)]<|python_end|>",
            "Hm.",
            [("f", '{"a": "it\'s", "b": [1, {"c": null}]}'), ("g", '{"e": -2.5}')],
        ),
        (r"[f(a='\ud800', b='é')]", "", [("f", r'{"a": "\ud800", "b": "\u00e9"}')]),
        ("A list: [1, 2] and x[f(1)].", "A list: [1, 2] and x[f(1)].", []),
        ("[f(a=1, b=2]) and the rest", " b=2]) and the rest", [("f", '{"a": 1')]),
        ("[f(a=1, b=(2]) and (3)", " b=(2]) and (3)", [("f", '{"a": 1')]),
        ("[f(a=1, b=x, ", " b=x, ", [("f", '{"a": 1')]),
        ("[f(a=2]) and [g()]", "[f(a=2]) and", [G]),
        (
            r"""[f(a='(]\'\\', b={')': ("}", [])})]""",
            "",
            [("f", r"""{"a": "(]'\\", "b": {")": ["}", []]}}""")],
        ),
        ("[f(a=1), g(b=x)] [g()]", ", g(b=x)]", [("f", '{"a": 1}'), G]),
    ],
    "mistral": [
        ("Just text.", "Just text.", []),
        (mistral(F_HARD), "", [F_HARD]),
        (f"Text \n{mistral(F_HARD, G, ('h', NESTED))}\n", "Text", [F_HARD, G, ("h", NESTED)]),
        (f"[TOOL_CALLS]f[ARGS]{HARD}", "", [F_HARD]),
        (
            f"[TOOL_CALLS]a.b[ARGS]{NESTED}[TOOL_CALLS]g[CALL_ID]x1[ARGS] {{}}[TOOL_CALLS] h{HARD}",
            "",
            [("a.b", NESTED), G, ("h", HARD)],
        ),
        ('[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [F]),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arg',
            ', {"name": "g", "arg',
            [F],
        ),
    ],
}
# What looks like a call and is none is text, whole.
OPEN = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
NO_OBJECTS = (
    "",
    "Hello",
    "{",
    "{}",
    "{'name': 'f', 'arguments': {}}",
    '{"name": "f"}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": null}',
    '{"name": 3, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    r'{"name": "\ud800", "arguments": {}}',
    r'{"name": "\x", "arguments": {}}',
    '{"name": "f" "arguments": {}}',
    '{"name" "f", "arguments": {}}',
    '{"name": "f",}',
    '{"a": , "name": "f", "arguments": {}}',
    '{"arguments": {]}, "name": "f"}',
    '{"arguments": {"a": 1}}',
    '{"name": "f", "argum',
)
BROKEN = [
    *(
        (family, opening + rest + end)
        for family, opening in OPEN.items()
        for rest in NO_OBJECTS
        for end in ("", " \n")
    ),
    *(
        ("mistral", f"[TOOL_CALLS]{rest}")
        for rest in ("[]", "[1]", "f", "f g{}", "f[ARG]{}", "f[CALL_ID]a", "[[", "é{}")
    ),
    ("hermes", "a <tool_call b < c"),
    ("hermes", "  </tool_call> <tool"),
    ("mistral", "a [TOOL [CALLS]"),
    ("llama3_json", '{"a": 1; {"b"'),
    *(
        ("qwen3_coder", f"<tool_call>{rest}")
        for rest in ("", "f", "<function=", "<function=a b>", "<function>", '{"name": "f"}')
    ),
    *(
        ("minimax_m2", f"<minimax:tool_call>{rest}")
        for rest in ("", "f", "<invoke>", '<invoke name="a b">', "<parameter name=")
    ),
    *(("glm45", f"<tool_call>{rest}") for rest in ("", "f", "a b<arg_key>", "f<x", "<arg_key>a")),
    *(
        ("deepseek_v3", f"<｜tool▁calls▁begin｜>{rest}")
        for rest in ("", "f", "<｜tool▁call▁begin｜>f", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[")
    ),
    *(
        ("kimi_k2", f"<|tool_calls_section_begin|>{rest}")
        for rest in ("", "f", "<|tool_call_begin|>f", "<|tool_call_begin|> <|tool_call_arg")
    ),
    *(
        ("llama4_pythonic", rest)
        for rest in ("[", "[]", "[f", "[f(", "[f(a", "[f(a=", "[f(a=x)]", "[f(1)]", "[f(a=1e999)]")
    ),
]
CASES = [
    *((family, *row) for family, rows in CANNED.items() for row in rows),
    *((family, text, text, []) for family, text in BROKEN),
]


def read(family: str, pieces: list[str]) -> list[Piece]:
    texts = Declared({"properties": {"text": {"type": "string"}}})
    parser = PARSERS[family]({"g": texts, "g.h": texts})
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return merged([*deltas, *parser.finish()])


def told(pieces: list[Piece]) -> tuple[str, list[Call]]:
    """The message and the calls. A call has its name first and its arguments right behind."""
    calls: list[Call] = []
    for last, piece in pairwise([Piece("text"), *pieces]):
        if piece.name:
            assert not piece.text
            calls.append((piece.name, ""))
        elif piece.kind == "call":
            assert last.kind == "call", "nothing comes between"
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return "".join(piece.text for piece in pieces if piece.kind == "text"), calls


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_known_outputs_parse_the_same_wherever_they_are_cut(family, text, content, calls):
    whole = read(family, [text])
    assert told(whole) == (content, calls)
    for at in range(len(text) + 1):
        assert read(family, [text[:at], text[at:]]) == whole
    assert read(family, list(text)) == whole


@given(data=st.data())
def test_deltas_of_any_cuts_join_to_the_same_message(data):
    family = data.draw(st.sampled_from(sorted(PARSERS)))
    own = [text for name, text, _, _ in CASES if name == family]
    bits = [
        *OPEN.values(),
        "</tool_call>",
        '{"name": "f", "arguments": {',
        *'{}[]":,;\\ \nfa1',
        "é",
    ]
    part = st.one_of(st.sampled_from(own), st.sampled_from(bits), st.text(max_size=3))
    text = "".join(data.draw(st.lists(part, max_size=12)))
    ends = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    borders = [0, *ends, len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    assert read(family, pieces) == read(family, [text])
    told(read(family, pieces))


@pytest.mark.parametrize(
    ("family", "before", "start", "most"),
    [
        ("hermes", "", '<tool_call>{"id": "', MAX_LENGTH),
        ("llama4_pythonic", "", '[f(a="', MAX_VALUE + len("[f(a=")),
        ("llama4_pythonic", "[f(a=1,", ' b="', MAX_VALUE + len(" b=")),
    ],
)
def test_what_is_too_long_for_a_part_of_a_call_is_text(family, before, start, most):
    parser, text = FAMILIES[family](), start + most * "a"
    parser.push(before)
    begun = process_time()
    for at in range(0, most, 8):
        assert parser.push(text[at : min(at + 8, most)]) == []
    assert process_time() - begun < 5, "no piece of it is read again with each that follows"
    assert told(parser.push(text[most:])) == (text, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=3)


@pytest.mark.slow
@given(
    given_calls=st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS), min_size=1),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_any_json_arguments_are_returned_unchanged(given_calls, ascii_only, indent):
    calls = [
        (name, json.dumps(arguments, ensure_ascii=ascii_only, indent=indent))
        for name, arguments in given_calls
    ]
    texts = {
        "hermes": "\n".join(hermes(*call) for call in calls),
        "llama3_json": "; ".join(llama(*call) for call in calls),
        "mistral": mistral(*calls),
        "deepseek_v3": deepseek(*calls),
        "kimi_k2": kimi(*calls),
    }
    for family, text in texts.items():
        assert told(read(family, list(text))) == ("", calls)


# What is returned at once: text up to what may begin a call; of a call its name, then arguments.
BEGUN = Piece("call", name="f")
SOON: list[tuple[str, list[tuple[str, list[Piece]]]]] = [
    (
        "hermes",
        [
            ("a < b", [Piece("text", "a < b")]),
            (" \n<tool", []),
            ("_call>", []),
            ('{"name": "f", "arguments": ', []),
            ('{"a', [BEGUN, Piece("call", '{"a')]),
            ('": "</', [Piece("call", '": "</')]),
            ('"}', [Piece("call", '"}')]),
            ("}\n</tool_call>", []),
        ],
    ),
    (
        "llama3_json",
        [
            ("x {", [Piece("text", "x")]),
            ("y", [Piece("text", " {y")]),
            ('{"name": "f", "parameters": {', [BEGUN, Piece("call", "{")]),
            ("}}", [Piece("call", "}")]),
            (";", []),
        ],
    ),
    ("mistral", [("[TOOL_CALLS]", []), ("f[ARGS]", []), ("{", [BEGUN, Piece("call", "{")])]),
]


@pytest.mark.parametrize(("family", "story"), SOON)
def test_text_is_returned_as_soon_as_it_is_certain(family, story):
    parser = FAMILIES[family]()
    for piece, expected in story:
        assert parser.push(piece) == expected
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ tools | tojson }}<tool_call>{{ call.arguments | tojson }}</tool_call>", "hermes"),
        ('<|start_header_id|>{% for t in tools %}"parameters": ', "llama3_json"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<tool_call><function=f><parameter=a>", "qwen3_coder"),
        ("{{ tools }}<seed:tool_call><function=f>", "seed_oss"),
        ("{{ tools }}<minimax:tool_call><invoke name=", "minimax_m2"),
        ("{{ tools }}]<]other[>[<tool_call>]<]other[>[<invoke name=", None),
        ("{{ tools }}<tool_call>{{ name }}<arg_key>", "glm45"),
        ("<|header_start|>{{ tools }}<|python_start|>", "llama4_pythonic"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}", "deepseek_v3"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}", "kimi_k2"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
        ("", None),
    ],
)
def test_chat_template_selects_the_parser_family(template, family):
    assert family_for_template(template) == family


def test_call_ids_are_unique_and_accepted_by_templates():
    for name, family in FAMILIES.items():
        ids = {family.new_id("f", number) for number in range(100)}
        assert len(ids) == 100
        if name == "kimi_k2":
            assert "functions.f:7" in ids
        elif name == "mistral":
            assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids)
        else:
            assert all(each.startswith("call_") for each in ids)
