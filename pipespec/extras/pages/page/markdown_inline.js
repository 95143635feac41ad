// Markdown within a paragraph: emphasis, code, links and line breaks, as plain objects.

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SPACE = /\s/;
const WORD = /[\p{L}\p{N}]/u;
const ADDRESS = /https?:\/\/[^\s<>"'`]+/y;
const BREAK = /<br[ \t]*\/?>/iy;
const ENTITY = /&(lt|gt|amp|quot|nbsp|#39);/y;
const ENTITIES = { lt: "<", gt: ">", amp: "&", quot: '"', nbsp: "\u00a0", "#39": "'" };
const LONGEST_ADDRESS = 2048;
const DEEPEST_BRACKET = 3; // in an address
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

/** The address of a link if a page may show it: of the web alone, else null. */
export function webAddress(text) {
  if (text.length > LONGEST_ADDRESS || !/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

/** The nodes of a text: strings, and {tag, children, href?}. `open`: the text goes on. */
export function inline(text, open = false) {
  return new Reader(text, open).read();
}

class Reader {
  // At most one of each marker is open, so that their number is bounded.
  #stack = [{ marker: null, children: [] }];
  #plain = "";

  constructor(text, open) {
    this.text = open ? withoutMarkers(text) : text;
    this.open = open;
    this.at = 0;
    this.ticks = null; // where runs of backticks are, by their length
  }

  read() {
    const { text } = this;
    while (this.at < text.length) {
      if (!this.#special(text[this.at])) {
        this.#plain += text[this.at];
        this.at += 1;
      }
    }
    while (this.#stack.length > 1) {
      if (this.open && this.#top.marker !== "[") this.#close(this.#stack.length - 1, true);
      else this.#giveUp();
    }
    this.#flush();
    return this.#top.children;
  }

  get #top() {
    return this.#stack.at(-1);
  }

  #flush() {
    if (this.#plain) this.#top.children.push(this.#plain);
    this.#plain = "";
  }

  #add(node, length) {
    this.#flush();
    this.#top.children.push(node);
    this.at += length;
    return true;
  }

  /** The innermost open marker was text. */
  #giveUp() {
    this.#flush();
    const { marker, children } = this.#stack.pop();
    this.#top.children.push(marker, ...children);
  }

  /** Close an open marker, and give up those within it. */
  #close(place, wrapped, more = {}) {
    while (this.#stack.length - 1 > place) this.#giveUp();
    this.#flush();
    const { marker, children } = this.#stack.pop();
    if (!wrapped) this.#top.children.push(...children);
    else this.#top.children.push({ tag: TAGS[marker] ?? "a", children, ...more });
  }

  #opened(marker) {
    return this.#stack.findIndex((frame) => frame.marker === marker);
  }

  #match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  /** Whether something was read at this place that is more than text. */
  #special(character) {
    switch (character) {
      case "\\":
        return this.#escape();
      case "`":
        return this.#code();
      case "\n":
        return this.#add({ tag: "br", children: [] }, 1);
      case "<":
        return this.#angle();
      case "&": {
        const entity = this.#match(ENTITY);
        if (!entity) return false;
        this.#plain += ENTITIES[entity[1]];
        this.at += entity[0].length;
        return true;
      }
      case "!":
        // An image is not loaded, but its address is a link.
        if (this.text[this.at + 1] !== "[") return false;
        this.at += 1;
        return this.#bracket();
      case "[":
        return this.#bracket();
      case "]":
        return this.#link();
      case "h":
        return this.#address();
      case "*":
      case "_":
      case "~":
        return this.#emphasis(character);
    }
    return false;
  }

  #escape() {
    const after = this.text[this.at + 1] ?? "";
    if (!PUNCTUATION.test(after)) return false;
    this.#plain += after;
    this.at += 2;
    return true;
  }

  #code() {
    const run = runAt(this.text, this.at);
    this.ticks ??= backticks(this.text);
    const places = this.ticks.get(run);
    while (places.length && places.at(-1) <= this.at) places.pop();
    const end = places.at(-1) ?? (this.open ? this.text.length : null);
    if (end === null) {
      this.#plain += "`".repeat(run);
      this.at += run;
      return true;
    }
    let code = this.text.slice(this.at + run, end).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    return this.#add({ tag: "code", children: [code] }, Math.min(end + run, this.text.length) - this.at);
  }

  #angle() {
    const line = this.#match(BREAK);
    if (line) return this.#add({ tag: "br", children: [] }, line[0].length);
    ADDRESS.lastIndex = this.at + 1;
    const found = ADDRESS.exec(this.text);
    const end = this.at + 1 + (found?.[0].length ?? 0);
    const href = found && this.text[end] === ">" ? webAddress(found[0]) : null;
    return href !== null && this.#add({ tag: "a", href, children: [found[0]] }, end + 1 - this.at);
  }

  #address() {
    if (WORD.test(this.text[this.at - 1] ?? "") || this.#opened("[") > 0) return false;
    const found = this.#match(ADDRESS);
    if (!found) return false;
    // A bracket or a stop after an address is not part of it, unless the bracket was opened in it.
    let address = withoutEnd(found[0], ".,:;!?*_~]");
    if (!address.includes("(")) address = withoutEnd(address, ")");
    const href = webAddress(address);
    if (href !== null) return this.#add({ tag: "a", href, children: [address] }, address.length);
    this.#plain += found[0];
    this.at += found[0].length;
    return true;
  }

  #bracket() {
    const place = this.#opened("[");
    if (place > 0) {
      // A link holds no other; the bracket before this one was text.
      while (this.#stack.length > place) this.#giveUp();
    }
    this.#flush();
    this.#stack.push({ marker: "[", children: [] });
    this.at += 1;
    return true;
  }

  #link() {
    const place = this.#opened("[");
    if (place < 1) return false;
    if (this.text[this.at + 1] === "(") {
      const found = destination(this.text, this.at + 2);
      if (found && (found.whole || this.open)) {
        // What leads elsewhere than to the web is no link, but its text.
        const href = found.whole ? webAddress(found.address) : null;
        this.#close(place, href !== null, { tag: "a", href });
        this.at = found.end;
        return true;
      }
    }
    while (this.#stack.length > place) this.#giveUp();
    return false;
  }

  #emphasis(character) {
    const run = runAt(this.text, this.at);
    const [before, after] = [this.text[this.at - 1] ?? " ", this.text[this.at + run] ?? " "];
    let opens = !SPACE.test(after);
    let closes = !SPACE.test(before);
    if (character === "_" && opens && closes && WORD.test(before) && WORD.test(after)) {
      opens = closes = false; // some_name
    }
    const lengths = character === "~" ? [2] : [2, 1];
    let left = run;
    if (run <= 3 && (character !== "~" || run === 2)) {
      // The markers that were opened last are closed first.
      const order = closes ? [...lengths].sort((a, b) => this.#place(character, b) - this.#place(character, a)) : [];
      for (const length of order) {
        const place = this.#place(character, length);
        if (left < length || place < 1) continue;
        this.#close(place, true);
        left -= length;
      }
      for (const length of opens ? lengths : []) {
        if (left < length || this.#place(character, length) > 0) continue;
        this.#flush();
        this.#stack.push({ marker: character.repeat(length), children: [] });
        left -= length;
      }
    }
    this.#plain += character.repeat(left);
    this.at += run;
    return true;
  }

  #place(character, length) {
    return this.#opened(character.repeat(length));
  }
}

/** The address in the brackets of a link, and where they end; `whole`: they do before the text
 * does. null: it is none. */
function destination(text, from) {
  let at = from;
  const most = Math.min(text.length, from + LONGEST_ADDRESS);
  const skip = () => {
    while (at < most && (text[at] === " " || text[at] === "\t")) at += 1;
  };
  skip();
  const begin = at;
  let depth = 0;
  for (; at < most && !SPACE.test(text[at]); at += 1) {
    if (text[at] === "(" && (depth += 1) > DEEPEST_BRACKET) return null;
    if (text[at] === ")" && (depth -= 1) < 0) break;
  }
  const address = text.slice(begin, at).replace(/^<|>$/g, "");
  skip();
  const quote = text[at];
  if (quote === '"' || quote === "'") {
    const end = text.slice(at + 1, most).indexOf(quote);
    at = end < 0 ? most : at + end + 2;
    skip();
  }
  if (at === text.length) return { address, end: at, whole: false };
  return text[at] === ")" ? { address, end: at + 1, whole: true } : null;
}

/** Of a text that goes on: without markers at its end, of which it is not known what they are. */
function withoutMarkers(text) {
  return withoutEnd(text, "*_~`[");
}

/** A text without these characters at its end. */
function withoutEnd(text, characters) {
  let end = text.length;
  while (end && characters.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

function runAt(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** Where the runs of backticks are, by their length, the last first. */
function backticks(text) {
  const found = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!found.has(run.length)) found.set(run.length, []);
    found.get(run.length).push(index);
  }
  for (const places of found.values()) places.reverse();
  return found;
}
