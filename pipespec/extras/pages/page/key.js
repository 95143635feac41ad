// The API key of this tab, and the form that asks for it.

import { byId, make } from "./dom.js";
import { recall, remember } from "./tab.js";

const KEY = "pipespec-key";

/** The headers that prove the key, if there is one. */
export function keyHeaders() {
  const key = recall(KEY);
  if (!key) return {};
  // A wrong key may have letters that fetch refuses in a header: it takes one byte for each.
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  return { Authorization: `Bearer ${bytes}` };
}

/** The form in an empty element `key-form`, shown when the server wants a key. */
export class KeyForm {
  /** `entered()` is called once a key was given; `word` is on the button. */
  constructor(word, entered) {
    this.field = make("input", { id: "key-value", type: "password", autocomplete: "off", required: "" });
    this.form = make(
      "form",
      { id: "key", hidden: "" },
      make("label", { for: "key-value" }, "API key"),
      this.field,
      make("button", { type: "submit" }, word),
    );
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      remember(KEY, this.field.value);
      this.field.value = "";
      entered();
    });
    byId("key-form").append(this.form);
  }

  ask() {
    this.form.hidden = false;
    this.field.focus();
  }

  hide() {
    this.form.hidden = true;
  }
}
