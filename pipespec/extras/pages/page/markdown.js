// Markdown as models write it, as a tree of plain objects: {tag, children, ...}. No HTML is read:
// a tag in the text is text. The time is linear in the text, however hostile it is.
//
// The text may be unfinished, as while it is streamed: what is open at its end counts as closed
// there, so that nothing changes its look when the rest arrives.

import { inline } from "./markdown_inline.js";

const DEEPEST = 8; // lists and quotes within one another; deeper ones are text
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>[ ]?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;
const TASK = /^\[([ xX])\][ \t]+/;
const DELIMITERS = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/; // of a trimmed line
const MOST_COLUMNS = 64;
// A last line of which it is not known yet what it begins.
const UNDECIDED = /^(?:>[ \t]?){0,8}(?:[-*+_]{1,2}|#{1,6}|\d{1,3}[.)]?|`{1,2}|~{1,2})?$/;

/** The blocks of a text, each with the `source` of which it is made. `open`: the text goes on. */
export function blocks(text, open = false) {
  const lines = text.replace(/\r\n?/g, "\n").replaceAll("\0", "\ufffd").split("\n");
  if (open && UNDECIDED.test(lines.at(-1).trim())) lines.pop();
  return parse(lines, 0, open);
}

function parse(lines, depth, open) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = next(lines, at, depth, open);
    block.source = lines.slice(at, end).join("\n");
    found.push(block);
    at = end;
  }
  return found;
}

/** The block that begins at a line, and the line after it. */
function next(lines, at, depth, open) {
  const line = lines[at];
  if (isFence(line)) return code(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    const children = inline(line.slice(heading[0].length).trim(), open && at === lines.length - 1);
    return [{ tag: `h${heading[1].length}`, children }, at + 1];
  }
  if (RULE.test(line)) return [{ tag: "hr", children: [] }, at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth, open);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth, open);
  if (isTable(lines, at, open)) return table(lines, at, open);
  return paragraph(lines, at, depth, open);
}

/** Whether a line begins a block of code: in backticks, none is behind them. */
function isFence(line) {
  const fence = FENCE.exec(line);
  return fence !== null && !(fence[1][0] === "`" && fence[2].includes("`"));
}

function code(lines, at) {
  const [, fence, more] = FENCE.exec(lines[at]);
  const [language] = more.trim().split(/\s/, 1);
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  return [{ tag: "pre", language, text, children: [] }, Math.min(end + 1, lines.length)];
}

function quote(lines, at, depth, open) {
  let end = at;
  const inner = [];
  while (end < lines.length && QUOTE.test(lines[end])) {
    inner.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  const children = parse(inner, depth + 1, open && end === lines.length);
  return [{ tag: "blockquote", children }, end];
}

const indent = (line) => /^ */.exec(line)[0].length;
const isOrdered = (marker) => marker.length > 1;

function list(lines, at, depth, open) {
  const first = ITEM.exec(lines[at])[2];
  const ordered = isOrdered(first);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || isOrdered(item[2]) !== ordered || item[2].at(-1) !== first.at(-1)) break;
    if (RULE.test(lines[end])) break;
    const spaces = item[3]?.length ?? 1;
    const inside = item[1].length + item[2].length + (spaces > 4 ? 1 : spaces);
    const inner = [lines[end].slice(Math.min(inside, lines[end].length))];
    end += 1;
    let blank = false;
    for (; end < lines.length; end += 1) {
      const line = lines[end];
      if (!line.trim()) {
        blank = true;
        inner.push("");
        continue;
      }
      // Less than `inside` is enough for what is within: models indent by two or by three.
      const within = indent(line) >= item[1].length + 2;
      if (!within && (blank || begins(line))) break;
      inner.push(line.slice(Math.min(indent(line), inside)));
      blank = false;
    }
    const task = TASK.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(task[0].length);
    const children = parse(inner, depth + 1, open && end === lines.length);
    items.push({ tag: "li", children, tight: !blankWithin(inner), done: task ? task[1] !== " " : null });
  }
  const start = ordered ? Number.parseInt(first, 10) : null;
  return [{ tag: ordered ? "ol" : "ul", start, children: items }, end];
}

const begins = (line) =>
  isFence(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

const blankWithin = (lines) => {
  const last = lines.findLastIndex((line) => line.trim());
  return lines.slice(0, last).some((line) => !line.trim());
};

/** Whether a table begins at a line. Of a text that goes on, the line below may not be there. */
function isTable(lines, at, open) {
  if (!lines[at].includes("|")) return false;
  if (at + 1 < lines.length && lines[at + 1].trim()) {
    const below = lines[at + 1];
    if (open && at + 2 === lines.length && /^[ \t|:-]+$/.test(below)) return true;
    return below.includes("|") && DELIMITERS.test(below.trim());
  }
  return open && at + 2 >= lines.length && /^ {0,3}\|/.test(lines[at]);
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  const found = [];
  let [from, ticked] = [0, false];
  for (let at = 0; at < inner.length && found.length < MOST_COLUMNS - 1; at += 1) {
    if (inner[at] === "\\") at += 1;
    else if (inner[at] === "`") ticked = !ticked;
    else if (inner[at] === "|" && !ticked) {
      found.push(inner.slice(from, at));
      from = at + 1;
    }
  }
  found.push(inner.slice(from));
  return found.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, at, open) {
  const head = cells(lines[at]);
  const aligned = at + 1 < lines.length ? cells(lines[at + 1]) : [];
  const alignment = head.map((_, column) => {
    const rule = aligned[column] ?? "";
    if (!rule.endsWith(":")) return "start";
    return rule.startsWith(":") ? "center" : "end";
  });
  let end = Math.min(at + 2, lines.length);
  const body = [];
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) {
    body.push(cells(lines[end]));
    end += 1;
  }
  const row = (tag, texts, last) => ({
    tag: "tr",
    children: head.map((_, column) => ({
      tag,
      align: alignment[column],
      children: inline(texts[column] ?? "", last),
    })),
  });
  const unfinished = (number) => open && end === lines.length && number === body.length - 1;
  const children = [
    { tag: "thead", children: [row("th", head, open && lines.length <= at + 1)] },
    { tag: "tbody", children: body.map((texts, number) => row("td", texts, unfinished(number))) },
  ];
  return [{ tag: "table", children }, end];
}

function paragraph(lines, at, depth, open) {
  let end = at + 1;
  // A number in the middle of a text begins no list.
  const ends = (line) =>
    !line.trim() ||
    isFence(line) ||
    HEADING.test(line) ||
    RULE.test(line) ||
    (depth < DEEPEST && (QUOTE.test(line) || (ITEM.test(line) && !/^\s*\d{2,}/.test(line))));
  while (end < lines.length && !ends(lines[end]) && !isTable(lines, end, open)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return [{ tag: "p", children: inline(text, open && end === lines.length) }, end];
}
