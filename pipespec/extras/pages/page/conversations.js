// The conversations of this browser, each a key of its local storage.

const PREFIX = "pipespec-chat:";
const TITLE = 60; // characters that a title takes from the first message

/** A conversation that has no message yet. */
export function newConversation() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  const id = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changed: Date.now(), messages: [] };
}

/** The name of a conversation: its own, or the beginning of its first message. */
export function titleOf({ title, messages }) {
  const first = (title || messages[0]?.content || "").trim().split("\n", 1)[0];
  const letters = [...first];
  return (letters.length > TITLE ? `${letters.slice(0, TITLE).join("")}…` : first) || "New conversation";
}

export class Conversations {
  #all = new Map();

  /** `changed(id)` is called when another tab has changed or removed a conversation. One that
   * `isOpen(id)` stays as it is here unless it was removed. `problem(sentence)` is called when one
   * cannot be kept. */
  constructor({ isOpen, changed, problem }) {
    this.problem = problem;
    for (const key of this.#keys()) this.#load(key);
    addEventListener("storage", ({ key }) => {
      const id = key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null;
      if (id === null || (isOpen(id) && localStorage.getItem(key) !== null)) return;
      this.#all.delete(id);
      this.#load(key);
      changed(id);
    });
  }

  get(id) {
    return this.#all.get(id) ?? null;
  }

  /** All of them, the last changed first. */
  list() {
    return [...this.#all.values()].sort((a, b) => b.changed - a.changed);
  }

  save(conversation) {
    conversation.changed = Date.now();
    this.#all.set(conversation.id, conversation);
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    } catch {
      this.problem(
        "This browser keeps no more, so this conversation is lost with the page; delete others.",
      );
    }
  }

  /** Save a conversation unless it was removed meanwhile. */
  update(conversation) {
    if (conversation && this.#all.get(conversation.id) === conversation) this.save(conversation);
  }

  remove(id) {
    this.#all.delete(id);
    try {
      localStorage.removeItem(PREFIX + id);
    } catch {
      return; // this browser keeps nothing
    }
  }

  #keys() {
    try {
      return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    } catch {
      return [];
    }
  }

  #load(key) {
    const found = readable(localStorage.getItem(key));
    if (found && PREFIX + found.id === key) this.#all.set(found.id, found);
  }
}

/** A conversation from its text; null: it is none. */
function readable(text) {
  try {
    const { id, title, changed, messages } = JSON.parse(text);
    const isText = (value) => typeof value === "string";
    const whole =
      isText(id) &&
      isText(title) &&
      Number.isFinite(changed) &&
      messages.every(({ role, content }) => ["user", "assistant"].includes(role) && isText(content));
    return whole ? { id, title, changed, messages } : null;
  } catch {
    return null;
  }
}
