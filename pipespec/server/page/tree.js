// The live tree of one request: what was accepted, pruned and is in flight.

import { byId, write } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [COLUMN, ROW, WIDTH, HEIGHT, LETTERS] = [100, 22, 84, 18, 10];
// Characters of the answer that are kept to be shown.
const KEPT = 600;

/** The nodes of a tree as the server tells it, by id. */
export function nodes(tree) {
  return tree.id.map((id, i) => ({
    id,
    parent: i ? tree.id[tree.parent[i]] : null,
    token: tree.token[i],
    text: tree.texts[i],
    logp: tree.logp[i],
    kind: i ? (tree.fed[i] ? "flight" : "waiting") : "root",
  }));
}

/** The nodes of a tree, and those of the one before that are no more: the way to the new root was
 * accepted, and what does not come from the new root was pruned. */
export function merged(before, now) {
  if (!before.length) return now;
  const old = new Map(before.map((node) => [node.id, node]));
  const present = new Set(now.map((node) => node.id));
  const [root] = now;
  const way = new Set();
  for (let id = old.get(root.id)?.parent ?? before[0].id; id !== null && id !== undefined; ) {
    if (id === root.id) return now; // nothing was decided
    way.add(id);
    id = old.get(id)?.parent;
  }
  const gone = before.filter(({ id }) => !present.has(id));
  const left = gone.map((node) => ({ ...node, kind: way.has(node.id) ? "accepted" : "pruned" }));
  // A token that was not in the tree follows what was the root.
  const planted = { ...root, parent: old.get(root.id)?.parent ?? before[0].id };
  const all = [...left, planted, ...now.slice(1)];
  const ids = new Set(all.map((node) => node.id));
  return all.filter((node) => node.parent === null || ids.has(node.parent));
}

/** Places for nodes: children right of their parents, the most probable on top and what was pruned
 * below. */
export function placed(all) {
  const children = new Map();
  for (const node of all) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  const places = new Map();
  let row = 0;
  const walk = (node, depth) => {
    const below = children.get(node.id) ?? [];
    below.sort((a, b) => isPruned(a) - isPruned(b) || b.logp - a.logp);
    const top = row;
    for (const child of below) walk(child, depth + 1);
    if (!below.length) row += 1;
    places.set(node.id, { node, depth, row: below.length ? top : row - 1 });
  };
  for (const root of children.get(null) ?? []) walk(root, 0);
  return [...places.values()];
}

const isPruned = ({ kind }) => kind === "pruned";

export class TreeView {
  #shown = null;
  #nodes = [];
  #fedAt = new Map();
  #text = "";
  held = false;

  /** Show nothing, or soon the tree of another request. */
  clear(words) {
    [this.#shown, this.#nodes, this.#text] = [null, [], ""];
    this.#fedAt.clear();
    byId("tree").replaceChildren();
    write(byId("text"), "");
    write(byId("tree-words"), words);
  }

  get request() {
    return this.#shown?.request ?? null;
  }

  show(tree) {
    if (this.held) return;
    const same = this.#shown && this.#shown.epoch === tree.epoch;
    const now = nodes(tree);
    if (!same) this.#fedAt.clear();
    const fed = now.filter(({ kind }) => kind === "flight");
    this.#fedAt = new Map(fed.map(({ id }) => [id, this.#fedAt.get(id) ?? tree.step]));
    const all = merged(same ? this.#nodes : [], now);
    this.#shown = tree;
    this.#nodes = now;
    this.#draw(all, tree);
    const told = tree.accepted_texts.join("");
    this.#text = (this.#text + told).slice(-KEPT);
    const mark = document.createElement("mark");
    mark.append(told);
    const before = this.#text.slice(0, this.#text.length - told.length);
    const text = byId("text");
    text.replaceChildren(before, mark);
    text.scrollTop = text.scrollHeight;
    const pruned = all.filter(isPruned).length;
    const shown = tree.size > now.length ? `, ${now.length} of them shown` : "";
    write(
      byId("tree-words"),
      `Request ${tree.request}, step ${tree.step}: ${tree.size} nodes${shown}, ${fed.length} in ` +
        `flight; accepted since it was drawn before: ${tree.accepted.length}, pruned: ${pruned}.`,
    );
  }

  #draw(all, tree) {
    const places = placed(all);
    const rows = 1 + Math.max(...places.map(({ row }) => row));
    const depth = 1 + Math.max(...places.map((place) => place.depth));
    const svg = element("svg", { width: depth * COLUMN, height: rows * ROW, role: "img" });
    svg.setAttribute("aria-label", "The tree that the words above describe");
    Object.assign(svg.dataset, { epoch: tree.epoch, step: tree.step, request: tree.request });
    const byNode = new Map(places.map((place) => [place.node.id, place]));
    for (const { node, depth: column, row } of places) {
      const [x, y] = [column * COLUMN + 1, row * ROW + 1];
      const parent = byNode.get(node.parent);
      if (parent) {
        const [fromX, fromY] = [parent.depth * COLUMN + WIDTH, parent.row * ROW + ROW / 2];
        const line = `M${fromX} ${fromY}H${x - 8}V${y - 1 + ROW / 2}H${x}`;
        svg.append(element("path", { d: line, class: node.kind }));
      }
      const group = element("g", { class: node.kind, transform: `translate(${x} ${y})` });
      group.append(element("rect", { width: WIDTH, height: HEIGHT, rx: 4 }));
      const text = element("text", { x: 5, y: HEIGHT - 5 });
      text.textContent = visible(node.text).slice(0, LETTERS);
      const title = element("title");
      title.textContent = this.#words(node, tree);
      group.append(text, title);
      Object.assign(group.dataset, { id: node.id, parent: node.parent ?? "", token: node.token });
      svg.append(group);
    }
    byId("tree").replaceChildren(svg);
  }

  #words(node, tree) {
    const stage = tree.step - (this.#fedAt.get(node.id) ?? tree.step) + 1;
    const kinds = {
      root: "the last accepted token",
      flight: `in flight, about stage ${stage}`,
      waiting: "not fed",
      accepted: "accepted",
      pruned: "pruned",
    };
    return `${JSON.stringify(node.text)}: ${kinds[node.kind]}, p ${Math.exp(node.logp).toFixed(3)}`;
  }
}

function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

function element(name, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
