// What is sent with every message, kept in local storage.

import { byId } from "./dom.js";

const KEPT = "pipespec-chat-settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const TEXTS = ["system", "reasoning_effort"];
const FIELDS = [...NUMBERS, ...TEXTS];

export class Settings {
  constructor() {
    const kept = read();
    for (const name of FIELDS) byId(name).value = kept[name] ?? "";
    this.showsTree = kept.tree === true;
    byId("settings-form").addEventListener("input", () => this.save());
    byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
    byId("reset").addEventListener("click", () => {
      for (const name of FIELDS) byId(name).value = "";
      this.save();
    });
  }

  /** The field that holds no valid value; null: all are valid. */
  get invalid() {
    return NUMBERS.map(byId).find((field) => !field.checkValidity()) ?? null;
  }

  /** The system prompt. */
  get system() {
    return byId("system").value.trim();
  }

  /** The fields of a request that were set. */
  get fields() {
    const found = {};
    for (const name of NUMBERS) {
      if (byId(name).value !== "") found[name] = byId(name).valueAsNumber;
    }
    const effort = byId("reasoning_effort").value;
    return effort ? { ...found, reasoning_effort: effort } : found;
  }

  save() {
    const values = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));
    try {
      localStorage.setItem(KEPT, JSON.stringify({ ...values, tree: this.showsTree }));
    } catch {
      return; // they last as long as the page
    }
  }
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}
