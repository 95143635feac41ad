// How one message of a conversation is shown, and what can be done with it.

import { make, write } from "./dom.js";
import { MarkdownView, copyButton } from "./markdown_view.js";

const LONGEST_THOUGHT = 200_000; // characters that are shown

/** A message on the page. `actions` has `regenerate()` and `edit(text)`, which returns whether the
 * text was taken. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    const isUser = message.role === "user";
    this.text = isUser ? make("div", { class: "plain", dir: "auto" }) : make("div", {});
    this.tools = make("div", { class: "tools" });
    this.figures = make("span", { class: "figures" });
    this.problem = make("p", { class: "problem", hidden: "" });
    const heading = make("h3", {}, isUser ? "You" : "Answer");
    this.element = make("li", { class: `message ${message.role}` }, heading);
    if (isUser) write(this.text, message.content);
    else this.#prepareAnswer();
    this.element.append(this.text, this.problem, this.tools);
    this.#prepareTools(isUser);
  }

  #prepareAnswer() {
    this.markdown = new MarkdownView();
    this.text = this.markdown.element;
    this.summary = make("summary");
    this.thought = make("div", { class: "plain", dir: "auto" });
    this.thinking = make("details", { hidden: "" }, this.summary, this.thought);
    this.element.append(this.thinking);
  }

  #prepareTools(isUser) {
    const button = (word, action) => {
      const made = make("button", { type: "button", class: "quiet" }, word);
      made.addEventListener("click", action);
      return made;
    };
    const copy = copyButton("Copy", "Copy the message", () => this.message.content);
    this.last = isUser
      ? button("Edit", () => this.edit())
      : button("Regenerate", () => this.actions.regenerate());
    this.last.classList.add(isUser ? "edit" : "regenerate");
    this.tools.append(copy, this.last);
    if (!isUser) this.tools.append(this.figures);
  }

  /** Show what the message is now; `open`: it goes on; `isLast`: it may be changed. */
  show({ open, isLast }) {
    const { message } = this;
    this.element.classList.toggle("open", open);
    this.last.hidden = !isLast || open;
    if (message.role === "user") return;
    write(this.last, message.problem ? "Try again" : "Regenerate");
    this.#showThought(open);
    this.markdown.show(message.content, open);
    this.text.setAttribute("aria-busy", String(open));
    write(this.figures, figuresOf(message, open));
    this.problem.hidden = !message.problem;
    write(this.problem, message.problem ?? "");
  }

  #showThought(open) {
    const { reasoning = "", content, thoughtFor } = this.message;
    this.thinking.hidden = !reasoning;
    const seconds = thoughtFor === undefined ? "" : ` for ${thoughtFor.toFixed(1)} s`;
    write(this.summary, open && !content ? "Thinking …" : `Thought${seconds}`);
    write(this.thought, reasoning.slice(0, LONGEST_THOUGHT));
  }

  /** Let the user change the message, of which all that follows is answered anew. */
  edit() {
    const field = make("textarea", { "aria-label": "Edit the message", rows: "3", dir: "auto" });
    const send = make("button", { type: "submit", class: "main" }, "Send");
    const leave = make("button", { type: "button" }, "Cancel");
    const form = make("form", { class: "editing" }, field, send, leave);
    const close = () => {
      form.remove();
      this.text.hidden = this.tools.hidden = false;
    };
    field.value = this.message.content;
    this.text.hidden = this.tools.hidden = true;
    this.element.append(form);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() && this.actions.edit(field.value)) close();
    });
    const cancel = () => {
      close();
      this.last.focus();
    };
    leave.addEventListener("click", cancel);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      } else if (sends(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    field.focus();
  }
}

/** Whether a key in a field means to send what is in it. On phones it begins a line. */
export function sends(event) {
  const plain = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  return plain && !matchMedia("(pointer: coarse)").matches;
}

/** How fast an answer came, in words. */
export function figuresOf({ figures, stopped, reason }, open) {
  const words = [];
  if (figures?.tokens > 1 && figures.seconds > 0) {
    words.push(`${((figures.tokens - figures.atFirst) / figures.seconds).toFixed(1)} tokens per second`);
  }
  if (figures?.tokens) {
    words.push(`${figures.tokens} tokens`, `first after ${figures.first.toFixed(2)} s`);
  }
  if (stopped) words.push("stopped");
  if (reason === "length" && !open) words.push("cut off at the token limit");
  return words.join(" · ");
}
