// The dashboard: hears the server's events, and shows once a frame what has changed.

import { Charts } from "./charts.js";
import { byId, make, write } from "./dom.js";
import { explain } from "./glossary.js";
import { Figures, History } from "./figures.js";
import { Panels } from "./panels.js";
import { Requests } from "./requests.js";
import { KeyForm } from "./key.js";
import { Stream } from "./stream.js";
import { TreeView } from "./tree.js";

const IDLE_MS = 1500; // without steps for so long, none is under way
const [LOWEST_TREE, HIGHEST_TREE] = [260, 560]; // pixels
const LOGGED = 100; // lines of the log
const MEASURED = 1000; // frames
const STEPS = 1001; // that wait for a frame: one more than there may be stages

const panels = new Panels();
const history = new History();
const charts = new Charts(history);
const tree = new TreeView({
  tree: byId("tree"),
  words: byId("tree-words"),
  text: byId("text"),
  height: () => Math.max(LOWEST_TREE, Math.min(HIGHEST_TREE, 0.6 * innerHeight)),
});
const requests = new Requests(watch);
const keyForm = new KeyForm("Show the cluster", () => stream.open());
const stream = new Stream(hear, connection, () => keyForm.ask());

let news = { snapshot: null, steps: [], tree: null }; // a tree that is held back stays in it
let [due, held, frames, lastSteps] = [false, false, 0, 0];
let known = { epoch: null, up: null, fault: null };

function hear(name, data) {
  const now = Date.now() / 1000;
  if (name === "history") {
    history.clear();
    byId("log").replaceChildren();
    known = { epoch: null, up: null, fault: null };
    for (const [at, tokens, steps, epoch, fault] of data.moments) {
      const time = now - (data.at - at);
      history.add(at, time, tokens, steps);
      log(epoch, fault, time);
    }
  } else if (name === "snapshot") {
    news.snapshot = data;
    const figures = new Figures(data);
    history.add(data.at, now, figures.value("decided_tokens_total"), figures.value("steps_total"));
    log(figures.value("epoch"), data.last_fault, now);
  } else {
    news.steps.push(...data.steps);
    news.steps.splice(0, news.steps.length - STEPS);
    if (data.tree && data.tree.request === requests.watched) {
      // What was accepted since the last drawing is not lost.
      if (news.tree) {
        for (const name of ["accepted", "accepted_texts"]) {
          news.tree[name].push(...data.tree[name]);
          data.tree[name] = news.tree[name];
        }
      }
      news.tree = data.tree;
    }
  }
  renderSoon();
}

/** Render with the next frame; none comes while the page is hidden. */
function renderSoon() {
  if (!due) requestAnimationFrame(render);
  due = true;
}

function render() {
  due = false;
  performance.mark("render");
  const { snapshot, steps, tree: newest } = news;
  news = { snapshot: null, steps: [], tree: held ? newest : null };
  if (snapshot) {
    const labels = [snapshot.time_scale !== null && "EMULATED", snapshot.synthetic && "SYNTHETIC"];
    write(byId("model"), snapshot.model);
    write(byId("labels"), labels.filter(Boolean).join(", "));
    document.querySelector("main").hidden = false;
    const figures = new Figures(snapshot);
    panels.figures(figures);
    requests.show(snapshot.requests);
    byId("tree-card").hidden = !snapshot.requests.length && requests.watched === null;
    charts.update();
    const { watched } = requests;
    if (watched !== null && !snapshot.requests.some(({ request }) => request === watched)) {
      if (tree.request === watched) write(byId("tree-words"), `Request ${watched} has ended.`);
    }
    document.body.dataset.snapshots = 1 + Number(document.body.dataset.snapshots ?? 0);
  }
  if (steps.length) lastSteps = performance.now();
  if (steps.length || performance.now() - lastSteps > IDLE_MS) panels.rows(steps);
  if (newest && !held) tree.show(newest);
  performance.measure("frame", "render");
  performance.clearMarks("render");
  if ((frames += 1) % MEASURED === 0) performance.clearMeasures("frame");
}

function watch(request) {
  requests.watched = request;
  news.tree = null;
  byId("unwatch").hidden = request === null;
  tree.clear(
    request === null
      ? "Choose an open request to watch its tree."
      : `Request ${request}: waiting for its next step.`,
  );
  for (const button of document.querySelectorAll("#requests .watch")) {
    const its = Number(button.closest("tr").dataset.key);
    button.setAttribute("aria-pressed", String(its === request));
  }
  stream.watch(request);
}

function connection(word, lost) {
  write(byId("connection"), word);
  byId("connection").classList.toggle("lost", lost);
  if (!lost) keyForm.hide();
}

/** What is new of epochs and faults at a time; an epoch of null: the cluster does not answer. */
function log(epoch, fault, time) {
  const said = [];
  const up = epoch !== null;
  if (known.up !== null && up !== known.up) {
    said.push(up ? "The cluster answers." : "The cluster does not answer.");
  }
  known.up = up;
  if (up) {
    const isNewFault = fault !== null && fault !== known.fault;
    if (known.epoch !== null && epoch !== known.epoch) said.push(`Epoch ${epoch} began.`);
    if (known.epoch !== null && isNewFault) said.push(`Ended: ${fault}`);
    known = { epoch, up, fault: fault ?? known.fault };
  }
  const when = new Date(1000 * time);
  for (const sentence of said) {
    const shown = make("time", { datetime: when.toISOString() }, when.toLocaleTimeString());
    byId("log").prepend(make("li", {}, shown, sentence));
  }
  while (byId("log").children.length > LOGGED) byId("log").lastChild.remove();
  byId("log-card").hidden = !byId("log").children.length;
}

byId("pause").addEventListener("click", ({ currentTarget }) => {
  held = !held;
  currentTarget.setAttribute("aria-pressed", String(held));
  renderSoon();
});
byId("unwatch").addEventListener("click", () => watch(null));
explain(document.body);
stream.open();
