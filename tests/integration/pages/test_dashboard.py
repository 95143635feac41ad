"""The dashboard in a real browser, beside a real server and cluster."""

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipespec.client import registry
from pipespec.client.registry import RunningCluster
from pipespec.config.hosts import own_name
from pipespec.controller.log_records import entries_of
from pipespec.controller.membership import Membership
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.head.tree_telemetry import TreeSnapshot
from tests.helpers.browser import KEY, View, check_controls, needs_chromium
from tests.helpers.sandbox import PATIENCE_S, Sandbox
from tests.helpers.serving import NAME, Server, serving
from tests.helpers.waiting import until

pytestmark = [pytest.mark.slow, needs_chromium]
HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def running(place: Sandbox, monkeypatch: pytest.MonkeyPatch) -> RunningCluster:
    monkeypatch.setenv("XDG_STATE_HOME", str(place.folder))
    return registry.find(NAME)


def snapshots(view: View, more: int = 2) -> None:
    """Wait until a page has received so many more."""
    seen = "Number(document.body.dataset.snapshots ?? 0)"
    now = view.page.evaluate(seen)
    view.wait(f"{seen} >= {now + more}")


def figures(view: View) -> list[dict[str, Any]]:
    """Every number on a page that stands for one of /metrics."""
    return view.page.evaluate(
        """() => [...document.querySelectorAll("[data-figure]")].map((each) => ({
            name: each.dataset.figure, labels: JSON.parse(each.dataset.labels),
            value: each.dataset.value, format: each.dataset.format, text: each.textContent,
        }))"""
    )


@pytest.fixture
def view(opened: Callable[..., View]) -> View:
    return opened()


class Asking:
    """Requests that run in the background, until they are left."""

    def __init__(self, server: Server, count: int, **more: Any):
        self._left = threading.Event()
        self._users = ThreadPoolExecutor(count)
        self._all = [self._users.submit(self._ask, server.url, LONG | more) for _ in range(count)]

    def _ask(self, url: str, body: dict[str, Any]) -> str:
        said = ""
        with (
            httpx2.Client(base_url=url, headers=HEADERS, timeout=PATIENCE_S) as http,
            http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply,
        ):
            for line in reply.iter_lines():
                said += line
                if self._left.is_set():
                    break
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self.said()
        self._users.shutdown()

    def said(self) -> list[str]:
        return [each.result(PATIENCE_S) for each in self._all]


def metrics(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Our figures by name and labels, without the prefix and the labels that all have."""
    text = server.http.get("/metrics").raise_for_status().text
    return {
        (sample.name.removeprefix("pipespec_"), labels(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("pipespec_")
    }


def labels(all_of_them: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value) for name, value in all_of_them.items() if name not in ("model_name", "engine")
    )


def idle(server: Server) -> None:
    names = ("num_requests_running", "num_requests_waiting", "kv_slots_held")
    until(lambda: not any(server.metric(f"pipespec_{name}") for name in names))


def quantile(told: dict[Any, float], name: str, share: float) -> float:
    """As Prometheus' histogram_quantile."""
    buckets = sorted(
        (float(dict(its)["le"]), count) for (n, its), count in told.items() if n == f"{name}_bucket"
    )
    below = before = 0.0
    for most, count in buckets:
        if count >= share * buckets[-1][1]:
            return below + (most - below) * (share * buckets[-1][1] - before) / (count - before)
        below, before = most, count
    raise AssertionError(name)


def test_every_number_on_the_page_equals_metrics(server, view):
    for _ in range(2):
        body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
        server.http.post("/v1/completions", json=body).raise_for_status()
    idle(server)
    before = metrics(server)
    snapshots(view, 3)
    found = figures(view)
    told = metrics(server)
    assert {each["name"] for each in found} > {
        *("num_requests_running", "kv_slots", "row_budget", "decided_tokens_total", "epoch"),
        *("stage_busy_share", "draft_rows_total", "draft_hits_total", "faults_total"),
        *("time_to_first_token_seconds_count", "inter_token_latency_seconds_count"),
    }
    assert before == told, "it was not idle"
    for each in found:
        value = told.get((each["name"], frozenset(each["labels"].items())))
        # What is not known is not shown; no guess of a depth may have come true.
        assert each["value"] == "" if value is None else float(each["value"]) == value, each
        if value is not None and each["format"] == "count":
            assert each["text"].replace(",", "") == str(int(value))
    derived = view.page.evaluate(
        """() => [...document.querySelectorAll("[data-derived]")].map(
            (each) => [each.dataset.derived, each.dataset.value])"""
    )
    assert len(derived) > 8
    for name, shown in derived:
        kind, _, part = name.partition("/")
        if part.endswith("_total"):
            value = told[kind, labels({})] / told[part, labels({})]
        elif kind == "acceptance-rate":
            depth = labels({"depth": part})
            value = told.get(("draft_hits_total", depth), 0) / told["draft_rows_total", depth]
        else:
            value = quantile(told, kind, float(part))
        assert float(shown) == pytest.approx(value), name
    cards = view.page.locator("#stages li").all_inner_texts()
    assert [card.split("\n")[0] for card in cards] == ["Head", "Stage 1", "Stage 2"]
    assert all(own_name() in card and "cpu" in card for card in cards)
    assert "layers 0-" in cards[1]


def test_displayed_tree_equals_the_heads(server, view, running):
    keys = RedisKeys(running.namespace)
    pipe = RedisConnection(running.url)
    try:
        with Asking(server, 1):
            view.page.wait_for_selector("#requests .watch").click()
            view.wait("document.querySelector('#tree .accepted') !== null")
            view.page.click("#pause")
            shown = view.page.evaluate(
                """() => ({
                    ...document.querySelector("#tree svg").dataset,
                    isWhole: (({ scrollWidth, scrollHeight, clientWidth, clientHeight }) =>
                        scrollWidth <= clientWidth && scrollHeight <= clientHeight)(
                        document.querySelector("#tree")),
                    nodes: [...document.querySelectorAll("#tree g")].map((each) => [
                        each.classList[0], ...["id", "parent", "token"].map(
                            (name) => Number(each.dataset[name])), each.textContent]),
                })"""
            )
            entries = entries_of(pipe.call("XRANGE", keys.published_steps, "-", "+"))
            (payload,) = (
                fields[shown["request"].encode()]
                for _, fields in entries
                if fields[b"epoch"] == shown["epoch"].encode()
                and fields[b"step"][:8] == int(shown["step"]).to_bytes(8, "little")
            )
            view.page.click("#pause")
            view.wait("document.querySelector('#tree .flight') !== null")
    finally:
        pipe.close()
    assert shown["isWhole"], "a part of the tree can only be seen by scrolling"
    tree = TreeSnapshot.unpack(payload)
    kinds = ["flight" if fed else "waiting" for fed in tree.fed.tolist()]
    parents = tree.id[tree.parent].tolist()
    columns = (tree.id.tolist(), parents, tree.token.tolist())
    expected = set(zip(["root", *kinds[1:]], *columns, strict=True))
    now = {tuple(each[:4]) for each in shown["nodes"] if each[0] not in ("accepted", "pruned")}
    (root,) = (each for each in now if each[0] == "root")
    # The root hangs where it did before; the head does not say.
    assert now - {root} == {each for each in expected if each[0] != "root"}
    assert (root[1], root[3]) == (tree.id[0], tree.token[0])
    assert any(each[0] == "accepted" for each in shown["nodes"])
    assert "has ended" in view.text("#tree-words") or view.text("#text")


REQUEST = 7


def telling(view: View, *events: tuple[str, dict[str, Any]]) -> None:
    """From now on the server's stream has these events and ends; the page asks again and again."""
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    view.page.unroute("**/events*")
    view.page.route(
        "**/events*", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )


def snapshot(ranks: int = 0, model: str = "m") -> tuple[str, dict[str, Any]]:
    """The event of an otherwise unknown cluster with one request."""
    places = [{"rank": str(rank), "host": "a", "layers": ""} for rank in range(ranks)]
    request = {"request": REQUEST, "taken": True, "length": 9, "prompt": 9, "watchable": True}
    return "snapshot", {
        "at": 1.0,
        "model": model,
        "time_scale": None,
        "synthetic": False,
        "figures": {"rank_place_info": [(place, 1.0) for place in places]},
        "last_fault": None,
        "requests": [request],
    }


def steps(*numbers: int, texts: list[str]) -> tuple[str, dict[str, Any]]:
    """The event of steps, with as many draft tokens as their number, and a tree of two nodes in
    the last of them that follows the accepted `texts`."""
    rows = [[1, number, 0, number, 0] for number in numbers]
    tree = {
        "epoch": 1,
        "step": numbers[-1],
        "request": REQUEST,
        "length": 9,
        "size": 2,
        "id": [0, 1],
        "parent": [0, 0],
        "token": [5, 6],
        "fed": [1, 1],
        "logp": [0, -0.5],
        "texts": ["a", "b"],
        "accepted": len(texts) * [1],
        "accepted_texts": texts,
    }
    return "steps", {"steps": rows, "tree": tree}


def test_each_stage_shows_the_batch_that_has_come_to_it(view):
    telling(view, snapshot(4), steps(7, 8, 9, texts=[]))
    view.page.reload()
    view.page.wait_for_selector("#requests .watch").click()
    words = [f"rows: 0 decided, {step} draft, 0 prompt" for step in (9, 8, 7)]
    shown = "[...document.querySelectorAll('#stages .words')].map((each) => each.textContent)"
    view.wait(f"{shown}.join() === '{','.join(words)}'")
    view.wait("document.querySelector('#tree .flight title') !== null")
    assert "in flight, about stage 1, p" in view.text("#tree .flight title")


def test_what_is_accepted_while_the_tree_is_held_is_shown_afterwards(view):
    words = [f"{number} " for number in range(300)]
    told = [steps(number, texts=[word]) for number, word in enumerate(words)]
    telling(view, snapshot())
    view.page.reload()
    view.page.wait_for_selector("#requests .watch")
    view.page.click("#pause")
    telling(view, *told, snapshot(model="heard"))
    view.page.click("#requests .watch")
    view.wait("document.querySelector('#model').textContent === 'heard'")
    telling(view, snapshot())
    assert view.text("#text") == ""
    view.page.click("#pause")
    # Its end, as the page keeps no more.
    view.wait(f"document.querySelector('#text').textContent === {''.join(words)[-600:]!r}")
    assert view.page.locator("#tree .root").count() == 1


def origins(view: View) -> list[tuple[str, str]]:
    """The client and the beginning of the text of each open request that a page lists."""
    found = view.page.evaluate(
        """() => [...document.querySelectorAll("#requests tbody tr")].map((row) =>
            ["client", "preview"].map((name) => row.querySelector(`.${name}`).textContent))"""
    )
    return [(client.partition(" · ")[0], preview) for client, preview in found]


def test_page_cancels_a_request(server, view):
    with Asking(server, 2) as asking:
        view.page.wait_for_selector("#requests tr:nth-child(2) .cancel")
        # The log has a request a moment before its server knows that it has taken it.
        until(lambda: origins(view) == 2 * [("127.0.0.1", "Once upon a time")])
        for _ in range(2):
            view.page.locator("#requests .cancel:enabled").first.click()
        said = asking.said()
        assert all("cancelled by another client" in each for each in said)
    view.wait("!document.querySelector('#requests tbody tr')")
    assert view.page.is_visible("#none-open")
    assert server.http.post("/requests/999999/cancel").status_code == 404
    assert server.http.post("/requests/0/cancel").status_code == 400


def test_page_asks_for_the_key_and_every_control_has_a_name(browser, server):
    context = browser.new_context(viewport={"width": 400, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.goto(server.url)
    field = page.get_by_label("API key")
    field.wait_for()
    for key, word in (("wrong", "an API key is needed"), (KEY, "connected")):
        field.fill(key)
        page.keyboard.press("Enter")
        page.get_by_role("status").get_by_text(word, exact=True).wait_for()
    with Asking(server, 1):
        page.wait_for_selector("#requests .cancel")
        # Nothing stands out at the side, and the colours are the dark ones.
        right = "document.querySelector('#requests .cancel').getBoundingClientRect().right"
        assert page.evaluate(right) < 400
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 28)"
        check_controls(page, least=6)
        page.get_by_role("button", name="Cancel request").first.focus()
        page.keyboard.press("Enter")
        page.locator("#requests tbody tr").wait_for(state="detached")
    context.close()


def test_page_shows_a_new_epoch_and_continues(server, view, running):
    snapshots(view)
    epoch = server.metric("pipespec_epoch")
    with Asking(server, 1):
        view.page.wait_for_selector("#requests .watch").click()
        view.page.wait_for_selector("#tree svg")
        with Membership(running.url, running.namespace) as shared:
            (pid,) = shared.alive([f"{own_name()}/1"]).values()
        os.kill(pid, signal.SIGKILL)
        view.wait("document.querySelector('#log').textContent.includes('began')")
        until(lambda: server.metric("pipespec_epoch") > epoch)
        view.wait(f"Number(document.querySelector('#tree svg')?.dataset.epoch) > {int(epoch)}")
    assert "Ended: epoch" in view.text("#log")


@pytest.mark.long
def test_page_reconnects_to_a_restarted_server(place, browser):
    arguments = ("--on", NAME, "--api-key", KEY, "--limit", "shutdown_timeout=30")
    with serving(place, *arguments) as first:
        port = first.url.rpartition(":")[2]
        view = View(browser, first.url)
        snapshots(view)
        # Who only watches does not hold up the end.
        assert first.end() == 0
        view.wait("document.querySelector('#connection').classList.contains('lost')")
    with serving(place, *arguments, "--port", port):
        view.wait("document.querySelector('#connection').textContent === 'connected'")
        snapshots(view)
    view.close()


def test_page_shows_no_empty_cards_and_explains_its_words(view):
    view.page.route("**/events*", lambda route: route.abort())
    view.page.reload()
    view.page.get_by_text("no answer; trying again").wait_for()
    assert not view.page.is_visible("main")
    telling(view, snapshot(3))
    view.page.locator("#tiles").wait_for()
    cards = view.page.locator("main section:visible h2").all_inner_texts()
    assert cards == ["Now", "Stages and links", "Open requests", "Tree of draft tokens"]
    words = "#tiles dt, #stages b, .legend .entry, #hits thead th"
    titles = "(all) => all.map(({ textContent, title }) => [textContent, title])"
    explained = view.page.locator(words).evaluate_all(titles)
    assert len(explained) > 25 and [word for word, title in explained if not title] == []


def test_page_shows_what_happened_before_it_was_opened(view):
    # Every five seconds ten tokens in four steps; then the cluster is away, and a new epoch begins.
    moments = [[5 * n, 10 * n, 4 * n, 1, None if n else "old"] for n in range(200)]
    moments += [[1000, *[None] * 4], [1005, 2000, 800, 2, "epoch 1 ended: new"]]
    telling(view, ("history", {"at": 1200, "moments": moments}), snapshot())
    view.page.reload()
    view.page.locator("#log li").first.wait_for()
    said = ("Ended: epoch 1 ended: new", "Epoch 2 began.", "answers.", "does not answer.")
    shown = view.page.locator("#log li").all_inner_texts()[1:]
    assert [line.endswith(end) for line, end in zip(shown, said, strict=True)] == 4 * [True]
    for chart, value in (("speed", "2.0 at "), ("gain", "2.50 at ")):
        view.page.locator(f"#{chart}").hover(position={"x": 300, "y": 40})
        assert view.text(f"#{chart}-value").startswith(value)


def test_hostile_names_and_texts_stay_text(place, browser):
    name = '<img src=x onerror="window.hacked = 1">'
    hostile = f"{name}\u202eevil"  # which the server refuses in its own name
    keys = ("--api-key", KEY, "--api-key", "other")
    arguments = ("--on", NAME, *keys, "--limit", "shutdown_timeout=0")
    with serving(place, *arguments, model=name) as server:
        view = View(browser, server.url)
        with Asking(server, 1, prompt=hostile):
            view.page.wait_for_selector("#requests .watch").click()
            view.page.wait_for_selector("#tree svg")
            assert origins(view) == [("127.0.0.1", hostile)]
            request = view.page.get_attribute("#tree svg", "data-request")
            path = f"{server.url}/events?request={request}"
            refused = httpx2.get(path, headers={"X-Api-Key": "other"})
            assert refused.status_code == 404
            assert f"no open request {request} with your API key" in refused.text
            assert view.text("#model") == name
            assert view.page.locator("main img, main script, header img").count() == 0
            assert view.page.evaluate("window.hacked === undefined")
        view.close()
