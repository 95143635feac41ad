// The live tree of one request: what was accepted, pruned and is in flight.

import { make, write } from "./dom.js";
import { columnWidth, isPruned, merged, nodes, placed, rows } from "./tree_layout.js";

const SVG = "http://www.w3.org/2000/svg";
// What is between columns and rows, and the width of a letter, in pixels.
const [BESIDE, BETWEEN, LETTER, PADDING] = [14, 3, 7.3, 10];
// Characters of the answer that are kept to be shown.
const KEPT = 600;

export class TreeView {
  #shown = null;
  #nodes = [];
  #fedAt = new Map();
  #text = "";

  /** `tree` is the element for the drawing, `words` the one for what it is, and `text` the one for
   * what was accepted, if that is wanted; `height()`: how high the drawing may be. */
  constructor({ tree, words, text = null, height }) {
    this.tree = tree;
    this.words = words;
    this.text = text;
    this.height = height;
  }

  /** Show nothing, or soon the tree of another request. */
  clear(words) {
    [this.#shown, this.#nodes, this.#text] = [null, [], ""];
    this.#fedAt.clear();
    this.tree.replaceChildren();
    this.tree.style.minHeight = "";
    if (this.text) write(this.text, "");
    write(this.words, words);
  }

  get request() {
    return this.#shown?.request ?? null;
  }

  show(tree) {
    const same = this.#shown && this.#shown.epoch === tree.epoch;
    const now = nodes(tree);
    if (!same) this.#fedAt.clear();
    const fed = now.filter(({ kind }) => kind === "flight");
    this.#fedAt = new Map(fed.map(({ id }) => [id, this.#fedAt.get(id) ?? tree.step]));
    const all = merged(same ? this.#nodes : [], now);
    this.#shown = tree;
    this.#nodes = now;
    this.#draw(all, tree);
    if (this.text) this.#showText(tree.accepted_texts.join(""));
    const pruned = all.filter(isPruned).length;
    const shown = tree.size > now.length ? `, ${now.length} of them shown` : "";
    write(
      this.words,
      `Request ${tree.request}, step ${tree.step}: ${tree.size} ${tree.size > 1 ? "nodes" : "node"}${shown}, ${fed.length} in ` +
        `flight; accepted since the last drawing: ${tree.accepted.length}, pruned: ${pruned}.`,
    );
  }

  #showText(told) {
    this.#text = (this.#text + told).slice(-KEPT);
    const place = Math.max(0, this.#text.length - told.length);
    const [before, newest] = [this.#text.slice(0, place), this.#text.slice(place)];
    this.text.replaceChildren(before, make("mark", {}, newest));
    this.text.scrollTop = this.text.scrollHeight;
  }

  #draw(all, tree) {
    const places = placed(all);
    const columns = 1 + Math.max(...places.map((place) => place.depth));
    const column = columnWidth(columns, this.tree.clientWidth);
    const lines = rows(places, this.height());
    const height = lines.at(-1).top + lines.at(-1).height;
    const svg = element("svg", { width: columns * column, height, role: "img" });
    svg.setAttribute("aria-label", "The tree that the words above describe");
    Object.assign(svg.dataset, { epoch: tree.epoch, step: tree.step, request: tree.request });
    const byNode = new Map(places.map((place) => [place.node.id, place]));
    const beside = Math.min(BESIDE, column / 3);
    const middle = ({ row }) => lines[row].top + (lines[row].height - 1) / 2;
    for (const place of places) {
      const parent = byNode.get(place.node.parent);
      if (!parent) continue;
      const [from, to] = [(parent.depth + 1) * column - beside, place.depth * column + 1];
      const line = `M${from} ${middle(parent)}H${to - beside / 2}V${middle(place)}H${to}`;
      svg.append(element("path", { d: line, class: place.node.kind }));
    }
    for (const { node, depth, row } of places) {
      const { top, height: its, isFull } = lines[row];
      const kind = isFull ? node.kind : `${node.kind} low`;
      const group = element("g", { class: kind, transform: `translate(${depth * column + 1} ${top})` });
      const width = column - beside - 1;
      group.append(element("rect", { width, y: 1, height: Math.max(its - (isFull ? BETWEEN : 2), 1), rx: isFull ? 4 : 1 }));
      const text = element("text", { x: PADDING / 2, y: its - BETWEEN - 4 });
      const title = element("title");
      text.textContent = isFull ? fitting(visible(node.text), (width - PADDING) / LETTER) : "";
      title.textContent = this.#about(node, tree);
      group.append(text, title);
      Object.assign(group.dataset, { id: node.id, parent: node.parent ?? "", token: node.token });
      svg.append(group);
    }
    this.tree.replaceChildren(svg);
    // What is below stays where it is while the tree grows and shrinks.
    const before = Number.parseFloat(this.tree.style.minHeight) || 0;
    this.tree.style.minHeight = `${Math.max(before, height)}px`;
  }

  #about(node, tree) {
    const step = tree.step - (this.#fedAt.get(node.id) ?? tree.step) + 1;
    const kinds = {
      root: "the last accepted token",
      flight: `in flight, about stage ${step}`,
      waiting: "not scheduled",
      accepted: "accepted",
      pruned: "pruned",
    };
    return `${JSON.stringify(node.text)}: ${kinds[node.kind]}, p ${Math.exp(node.logp).toFixed(3)}`;
  }
}

function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

/** A text of so many letters at most. */
function fitting(text, most) {
  const letters = [...text];
  if (letters.length <= most) return text;
  return most < 2 ? letters.slice(0, 1).join("") : `${letters.slice(0, Math.floor(most) - 1).join("")}…`;
}

function element(name, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
