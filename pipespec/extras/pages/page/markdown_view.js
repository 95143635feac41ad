// Markdown on the page: elements of a few kinds, made one by one, and text that stays text.

import { make } from "./dom.js";
import { highlighted } from "./highlight.js";
import { blocks } from "./markdown.js";

const COPIED_MS = 1500;
// The elements that a text may have; nothing else is made.
const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 hr blockquote ul ol li table thead tbody tr th td em strong del code a br pre".split(" "),
);
// Headings of an answer are below that of the page's message.
const HEADINGS = { h1: "h4", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" };
const LARGEST_START = 999_999_999;

/** A text on the page that grows: what has not changed stays, with what is selected in it. */
export class MarkdownView {
  #sources = [];

  constructor() {
    this.element = make("div", { class: "markdown" });
  }

  /** Show a text; `open`: it goes on. */
  show(text, open) {
    const all = blocks(text, open);
    all.forEach((block, place) => {
      // How an open block looks depends on its being the last one.
      const source = `${open && place === all.length - 1}${block.source}`;
      if (this.#sources[place] === source) return;
      const element = built(block);
      const before = this.element.children[place];
      if (before) before.replaceWith(element);
      else this.element.append(element);
      this.#sources[place] = source;
    });
    while (this.element.children.length > all.length) this.element.lastChild.remove();
    this.#sources.length = all.length;
  }
}

function built(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (!TAGS.has(node.tag)) throw new Error(`no element ${node.tag}`);
  if (node.tag === "pre") return codeBlock(node);
  const element = make(HEADINGS[node.tag] ?? node.tag);
  const { tag } = node;
  if (tag in HEADINGS) element.className = tag;
  if (["p", "li", "th", "td", ...Object.keys(HEADINGS)].includes(tag)) element.dir = "auto";
  if (tag === "code") element.dir = "ltr";
  if (tag === "th") element.scope = "col";
  if (node.align && node.align !== "start") element.className = node.align;
  if (node.start !== undefined && node.start !== null && node.start !== 1) {
    element.setAttribute("start", Math.min(node.start, LARGEST_START));
  }
  if (tag === "a") link(element, node.href);
  if (typeof node.done === "boolean") {
    element.className = "task";
    element.append(node.done ? "☑ " : "☐ ");
  }
  const children = node.tight ? node.children.flatMap(unwrapped) : node.children;
  element.append(...children.map(built));
  if (tag !== "table") return element;
  return make("div", { class: "scroll table", tabindex: "0", role: "group", "aria-label": "Table" }, element);
}

/** Of items of a list without blank lines, the text needs no paragraph. */
const unwrapped = (child) => (child.tag === "p" ? child.children : [child]);

function link(element, href) {
  element.href = href;
  element.title = href;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
}

function codeBlock({ text, language }) {
  const code = make("code", { dir: "ltr" });
  for (const [piece, kind] of highlighted(text, language)) {
    code.append(kind ? make("span", { class: `code-${kind}` }, piece) : piece);
  }
  const copy = copyButton("Copy", "Copy the code", () => text);
  const named = language ? `Code, ${language}` : "Code";
  const pre = make("pre", { tabindex: "0", role: "group", "aria-label": named }, code);
  return make("div", { class: "code" }, make("div", { class: "bar-of-code" }, make("span", {}, language), copy), pre);
}

/** A button that copies what `text()` returns. */
export function copyButton(word, label, text) {
  const button = make("button", { type: "button", class: "quiet", "aria-label": label }, word);
  button.addEventListener("click", async () => {
    const done = await copied(text());
    button.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = word), COPIED_MS);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers have no clipboard for pages without TLS, but for what is selected.
    const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
    const focused = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}
