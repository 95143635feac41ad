"""The chat page in a real browser, beside a real server and cluster."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.browser import KEY, View, check_controls, needs_chromium
from tests.helpers.serving import MODEL, Server
from tests.helpers.waiting import until

pytestmark = [pytest.mark.slow, needs_chromium]
COMPLETIONS = "**/v1/chat/completions"
QUESTION = "Tell me a story"
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">

[a](javascript:window.hacked=1) [b](data:text/html,x) [c](//evil.test) ![d](https://evil.test/d.png)
<https://evil.test/"onmouseover="window.hacked=1> **<b onclick=x>**

```html"><img src=x onerror=window.hacked=1>
</code></pre><script>window.hacked = 1</script>
```

| <i>a</i> | `<u>` |
|---|---|
| <svg onload=window.hacked=1> | [e](vbscript:x) |

\u202e\u2066\u0000 turned

مرحبا بالعالم
"""
# Every kind of block, as models write them.
SAMPLE = """# Title

Some **bold and *both***, `a * b`, a_b_c and 2 * 3.
Next line.

- one
- two
  1. deep
  2. deeper

> quoted
> more

| a | b |
|---|--:|
| 1 | 2 |

```python
x = "*"  # y
```

---
The end: 42"""


@pytest.fixture
def view(opened: Callable[..., View]) -> View:
    return opened("/chat")


def say(view: View, text: str) -> None:
    view.page.fill("#message", text)
    view.page.keyboard.press("Enter")


def set_fields(view: View, **fields: Any) -> None:
    view.page.click("#show-settings")
    for name, value in fields.items():
        view.page.fill(f"#{name}", str(value))
    view.page.click("#show-settings")


def answered(view: View) -> str:
    """The text of the last answer, once it is complete."""
    view.page.locator(".message.assistant:not(.open) .regenerate:visible").wait_for()
    return view.text(".message.assistant:last-child .markdown")


def endless(view: View) -> None:
    """From now on answers are as long as the context has room for."""

    def lengthened(route: Any) -> None:
        body = json.loads(route.request.post_data) | {"ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    view.page.route(COMPLETIONS, lengthened)


def replying(
    view: View, *pieces: str | dict[str, str], tail: str = "data: [DONE]\n\n", **options: Any
) -> None:
    """From now on the server's reply is a stream of these pieces, texts or whole deltas, or has
    these properties."""
    deltas = ({"content": each} if isinstance(each, str) else each for each in pieces)
    chunks = ({"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas)
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    reply = {"status": 200, "content_type": "text/event-stream", "body": events + tail} | options
    view.page.route(COMPLETIONS, lambda route: route.fulfill(**reply))


def aborted(server: Server) -> float:
    """How many answers their clients have left."""
    name, label = "pipespec_request_success_total", "('finished_reason', 'abort')"
    counted = server.counted().items()
    return sum(count for (its, *labels), count in counted if its == name and label in labels)


def test_chat_by_keyboard_streams_the_servers_text(opened, server):
    view = opened("/chat", key=None, viewport={"width": 400, "height": 800}, color_scheme="dark")
    page = view.page
    page.get_by_label("API key").wait_for()
    page.keyboard.type("wrong–ключ")
    page.keyboard.press("Enter")
    page.get_by_role("status").get_by_text("This server needs an API key").wait_for()
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.get_by_label("API key").wait_for(state="hidden")
    set_fields(view, temperature=0, max_tokens=24, system="Be brief.")
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    answered(view)
    messages = [("system", "Be brief."), ("user", QUESTION)]
    expected = server.openai(KEY).chat.completions.create(
        model=MODEL,
        messages=[{"role": role, "content": content} for role, content in messages],  # type: ignore[misc]
        temperature=0,
        max_tokens=24,
    )
    text = expected.choices[0].message.content
    assert text and page.inner_text(".message.assistant .markdown").split() == text.split()
    assert view.text("#announcement") == f"Answer: {text}"
    figures = view.text(".figures")
    assert "tokens per second" in figures and "24 tokens" in figures
    assert "cut off at the token limit" in figures
    assert page.evaluate("document.activeElement.id") == "message"
    check_controls(page, least=14)
    page.click("#show-settings")
    page.get_by_label("System prompt").focus()
    page.keyboard.press("Escape")
    assert page.is_hidden("#settings")
    assert page.evaluate("document.activeElement.id") == "show-settings"
    for name in ("Tree", "Conversations", "New conversation"):
        page.get_by_role("button", name=name, exact=True).click()
    assert view.text("h2#title") == "New conversation"


def test_answer_is_stopped_regenerated_and_edited(view, server):
    page, before = view.page, aborted(server)
    endless(view)
    say(view, QUESTION)
    page.wait_for_selector(".message.open .markdown p")
    assert page.is_visible("#stop") and not page.is_visible("#send")
    page.keyboard.press("Escape")
    assert answered(view)
    assert "stopped" in view.text(".figures")
    until(lambda: aborted(server) > before)
    page.unroute(COMPLETIONS)
    set_fields(view, temperature=0, max_tokens=12)
    page.get_by_role("button", name="Regenerate").click()
    first = answered(view)
    assert "12 tokens" in view.text(".figures") and "stopped" not in view.text(".figures")
    page.focus("#message")
    page.keyboard.press("ArrowUp")
    page.get_by_label("Edit the message").fill("How many apples has Tom?")
    # What was written stays where a setting must be mended first.
    set_fields(view, temperature=-1)
    page.locator(".editing .main").click()
    assert page.is_visible("#settings")
    assert page.input_value(".editing textarea") == "How many apples has Tom?"
    page.fill("#temperature", "0")
    page.focus(".editing textarea")
    page.keyboard.press("Enter")
    view.wait("document.querySelector('.message.user .plain').textContent.startsWith('How')")
    assert answered(view) != first
    assert page.locator(".message").count() == 2


def test_conversations_are_kept_renamed_exported_and_deleted(view, server):
    page = view.page
    set_fields(view, max_tokens=4)
    for text in ("First question\nand more", "Second question"):
        page.click("#new")
        say(view, text)
        answered(view)
    titles = page.locator("#conversations button")
    assert titles.all_inner_texts() == ["Second question", "First question"]
    page.reload()
    assert view.text("h2#title") == "Second question"
    assert page.locator(".message").count() == 2 and page.input_value("#max_tokens") == "4"
    titles.nth(1).click()
    page.click("#rename")
    page.keyboard.type("Renamed <b>")
    page.keyboard.press("Enter")
    assert titles.all_inner_texts() == ["Renamed <b>", "Second question"]
    with page.expect_download() as download:
        page.click("#export")
    exported = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert exported["title"] == "Renamed <b>"
    roles = [message["role"] for message in exported["messages"]]
    assert roles == ["user", "assistant"]
    page.click("#delete")
    assert titles.all_inner_texts() == ["Second question"]
    page.get_by_role("button", name="Undo").click()
    assert view.text("h2#title") == "Renamed <b>"
    page.click("#delete")
    page.reload()
    assert titles.all_inner_texts() == ["Second question"]
    titles.first.click()
    assert page.locator(".message").count() == 2
    another_tab = page.context.new_page()
    another_tab.goto(page.url)
    another_tab.locator("#conversations button").click()
    another_tab.click("#delete")
    view.wait("document.querySelectorAll('.message').length === 0")
    assert view.text("h2#title") == "New conversation"
    # One that is being answered ends, and is not kept again.
    before = aborted(server)
    set_fields(view, max_tokens="")
    endless(view)
    say(view, "Third question")
    page.wait_for_selector(".message.open .markdown p")
    another_tab.locator("#conversations button").click()
    another_tab.click("#delete")
    view.wait("document.querySelectorAll('.message').length === 0")
    until(lambda: aborted(server) > before)
    for tab in (page, another_tab):
        tab.reload()
        assert tab.locator("#conversations button").count() == 0


def test_errors_are_sentences_and_the_answer_can_be_tried_again(view):
    page = view.page
    failed = 'data: {"error": {"message": "A rank has failed; send it again."}}\n\ndata: [DONE]\n\n'
    set_fields(view, max_tokens=4)
    for sentence, reply in (
        ("try again in 7 seconds", {"status": 429, "headers": {"Retry-After": "7"}}),
        ("The server does not answer", None),
        ("answered with the status 502", {"status": 502, "body": "<h1>Bad gateway</h1>"}),
        ("A rank has failed; send it again.", {"pieces": ["A part"], "tail": failed}),
        ("before the answer was complete", {"pieces": ["A part"], "tail": ""}),
    ):
        page.click("#new")
        if reply is None:
            page.route(COMPLETIONS, lambda route: route.abort())
        else:
            replying(view, *reply.pop("pieces", ()), **reply)
        say(view, QUESTION)
        page.locator(".problem").get_by_text(sentence).wait_for()
        assert view.text(".markdown") == ("A part" if "tail" in (reply or {}) else "")
        page.unroute(COMPLETIONS)
    page.get_by_role("button", name="Try again").click()
    view.wait("document.querySelector('.problem').hidden")
    assert answered(view)
    # An answer that never was is not sent.
    page.click("#new")
    replying(view, status=503)
    say(view, "First")
    page.locator(".problem").get_by_text("503").wait_for()
    page.unroute(COMPLETIONS)
    with page.expect_request(COMPLETIONS) as request:
        say(view, "Second")
    assert request.value.post_data_json["messages"] == [
        {"role": "user", "content": "First\n\nSecond"}
    ]
    assert answered(view)


def test_chat_works_where_the_browser_keeps_nothing(opened):
    view = opened("/chat", key=None)
    page = view.page
    view.context.add_init_script(
        """for (const name of ["localStorage", "sessionStorage"])
            Object.defineProperty(window, name, {
                get() { throw new DOMException("Access is denied", "SecurityError"); },
            });"""
    )
    page.reload()
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_label("API key").wait_for(state="hidden")
    set_fields(view, max_tokens=4)
    say(view, QUESTION)
    answered(view)
    page.click("#new")
    page.get_by_role("button", name=QUESTION).click()
    assert page.locator(".message").count() == 2


def test_tree_of_the_answer_is_shown_beside_it(view):
    page = view.page
    page.get_by_role("button", name="Tree").click()
    endless(view)
    with page.expect_response(COMPLETIONS) as response:
        say(view, QUESTION)
    number = response.value.headers["x-pipespec-request"]
    view.wait("document.querySelector('#tree .flight') !== null")
    assert page.get_attribute("#tree svg", "data-request") == number
    page.get_by_role("button", name="Stop").click()
    answered(view)


def test_hostile_answers_stay_text(view):
    pieces = [HOSTILE[at : at + 3] for at in range(0, len(HOSTILE), 3)]
    replying(view, *pieces)
    say(view, HOSTILE)
    assert "window.hacked = 1" in answered(view)
    page = view.page
    found = page.evaluate(
        """() => {
            const all = [...document.querySelectorAll("#messages *")];
            return {
                tags: [...new Set(all.map((each) => each.localName))],
                handlers: all.flatMap((each) => each.getAttributeNames())
                    .filter((name) => name.startsWith("on") || name === "src" || name === "style"),
                links: all.filter((each) => each.href).map(({ href, rel }) => [href, rel]),
                hacked: window.hacked ?? null,
            };
        }"""
    )
    assert found["handlers"] == [] and found["hacked"] is None
    assert not {"script", "img", "svg", "i", "u", "b", "iframe"} & set(found["tags"])
    addresses = ["https://evil.test/d.png", "https://evil.test/"]
    assert found["links"] == [[href, "noopener noreferrer nofollow"] for href in addresses]
    direction = "getComputedStyle([...document.querySelectorAll('.markdown p')].at(-1)).direction"
    assert page.evaluate(direction) == "rtl"
    assert view.text(".message.user .plain") == HOSTILE
    # A long text that opens everything and closes nothing is drawn too, and a long address.
    address = f"https://a{100_000 * '.'}b "
    replying(view, address, *(4_000 * ["**[`_![](https://<a|>\n- 1. "]))
    page.get_by_role("button", name="Regenerate").click()
    assert "https" in answered(view)


def test_reasoning_is_folded(view):
    replying(
        view, {"reasoning_content": "Think <b>"}, {"reasoning_content": " well."}, "So *it* is."
    )
    say(view, QUESTION)
    assert answered(view) == "So it is."
    thought = view.page.get_by_text("Think <b> well.")
    assert not thought.is_visible()
    view.page.get_by_text("Thought for").click()
    assert thought.is_visible()


CASES = {
    "*a* __b__ ~~c~~ `d`": "<p><em>a</em> <strong>b</strong> <del>c</del> <code>d</code></p>",
    "***a*** **b *c* d**": "<p><strong><em>a</em></strong> <strong>b <em>c</em> d</strong></p>",
    "a_b_c 2 * 3 \\*d\\*": "<p>a_b_c 2 * 3 *d*</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# a\n### b #1": "<h1>a</h1><h3>b #1</h3>",
    "- a\n  - b\n- c": "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ul>",
    "3. a\n4. b": "<ol><li><p>a</p></li><li><p>b</p></li></ol>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote>",
    "|a|b|\n|-|-|\n|`x|y`|": "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr>"
    "<td><code>x|y</code></td><td></td></tr></tbody></table>",
    "a\n```js\n*b*\n```\nc": "<p>a</p><pre>*b*</pre><p>c</p>",
    "a\n***\n---": "<p>a</p><hr><hr>",
    "[a](https://b.test/c_(d)) <http://e.test>": "<p><a>a</a> <a>http://e.test</a></p>",
    "see https://a.test/b, or (https://c.test).": "<p>see <a>https://a.test/b</a>, or "
    "(<a>https://c.test</a>).</p>",
    "[a](javascript:b) [c] &lt; <b>": "<p>a [c] < <b></p>",
}
WRITE = """const within = (node) => node.text ?? node.children.map(write).join("");
const write = (node) => typeof node === "string" ? node : "br hr".includes(node.tag) ?
    `<${node.tag}>` : `<${node.tag}>${within(node)}</${node.tag}>`;
const { blocks } = await import("/page/markdown.js");"""


def test_markdown_is_read_as_models_write_it(view):
    script = (
        f"async (texts) => {{ {WRITE} return texts.map((t) => blocks(t).map(write).join('')); }}"
    )
    found = view.page.evaluate(script, [*CASES])
    assert dict(zip(CASES, found, strict=True)) == CASES


def test_unfinished_markdown_keeps_its_look_while_it_grows(view):
    script = f"""async (text) => {{ {WRITE}
        return [...text].map((_, i) => blocks(text.slice(0, i + 1), true).map(write));
    }}"""
    found = view.page.evaluate(script, SAMPLE)
    final = view.page.evaluate(
        f"async (text) => {{ {WRITE} return blocks(text).map(write); }}", SAMPLE
    )
    for blocks, more in zip(found, [*found[1:], final], strict=True):
        assert len(blocks) <= len(more)
        # What is complete stays as it is, and what grows keeps its kind and its text.
        for before, after in zip(blocks[:-1], more, strict=False):
            assert before == after
        if blocks:
            (kind, text), (later, longer) = (
                (block[1:].partition(">")[0], plain(block))
                for block in (blocks[-1], more[len(blocks) - 1])
            )
            assert kind == later and longer.startswith(text)


def plain(block: str) -> str:
    """The text of a block without its elements."""
    parts = block.replace("<", "\0<").replace(">", ">\0").split("\0")
    return "".join(part for part in parts if not part.startswith("<"))


def test_code_is_coloured_by_its_language(view):
    script = """async ([code, language]) => {
        const { highlighted } = await import("/page/highlight.js");
        return highlighted(code, language).filter(([, kind]) => kind);
    }"""
    code = 'def f(x):  # "note"\n    return "a#b" + 1.5'
    assert view.page.evaluate(script, [code, "Python"]) == [
        ["def", "keyword"],
        ['# "note"', "comment"],
        ["return", "keyword"],
        ['"a#b"', "string"],
        ["1.5", "number"],
    ]
    for unknown in ("unheard-of", ""):
        assert view.page.evaluate(script, [code, unknown]) == []
    assert view.page.evaluate(script, ["SELECT a -- b", "sql"]) == [
        ["SELECT", "keyword"],
        ["-- b", "comment"],
    ]
