// Elements, and how numbers are written.

const UNKNOWN = "–";

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; a child that is text stays text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
export const share = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
export const decimal = (value) => value.toFixed(2);
export const seconds = (value) =>
  value < 1 ? `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;

/** Writes a number, and beside it what it is exactly. */
export function show(element, value, format) {
  write(element, value === null ? UNKNOWN : format(value));
  element.dataset.value = value === null ? "" : String(value);
}

/** An element for a figure of /metrics: `refresh` writes what it is now. */
export function figure(tag, name, format = count, labels = {}) {
  return make(tag, {
    "data-figure": name,
    "data-labels": JSON.stringify(labels),
    "data-format": format.name,
  });
}

const FORMATS = { count, share, decimal, seconds };

/** Write every figure below an element. */
export function refresh(element, figures) {
  for (const each of element.querySelectorAll("[data-figure]")) {
    const { figure: name, labels, format } = each.dataset;
    show(each, figures.value(name, JSON.parse(labels)), FORMATS[format]);
  }
}

/** As many children as there are keys, in their order; those that stay are kept, and so is what
 * has the focus. `build(key)` makes one. Returns them by key. */
export function keep(parent, keys, build) {
  const wanted = new Set(keys.map(String));
  const have = new Map();
  for (const child of [...parent.children]) {
    if (wanted.has(child.dataset.key)) have.set(child.dataset.key, child);
    else child.remove();
  }
  keys.forEach((key, place) => {
    let child = have.get(String(key));
    if (!child) {
      child = build(key);
      child.dataset.key = key;
      have.set(String(key), child);
    }
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
  });
  return have;
}
