// The event stream of the server.

import { keyHeaders } from "./key.js";
import { serverSentEvents } from "./sse.js";

const AGAIN_MS = 1000;

/** Have the server end a request; what went wrong as a sentence, or null. */
export async function cancel(request) {
  try {
    const reply = await fetch(`/requests/${request}/cancel`, { method: "POST", headers: keyHeaders() });
    return reply.ok ? null : (await reply.json()).error.message;
  } catch {
    return "The server does not answer.";
  }
}

/** Follows /events until it is closed. */
export class Stream {
  #request = null;
  #reading = null;
  #again = 0;

  /** `onEvent(name, data)` takes events; `onState(word, isLost)` how the connection is;
   * `onLocked()`: a key is needed. */
  constructor(onEvent, onState, onLocked) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.onLocked = onLocked;
  }

  /** Begin anew, watching the tree of a request; null: of none. */
  watch(request) {
    this.#request = request;
    this.open();
  }

  open() {
    this.close();
    const reading = (this.#reading = new AbortController());
    this.#read(reading.signal).catch(() => {
      if (!reading.signal.aborted) this.#retry("no answer; trying again");
    });
  }

  close() {
    clearTimeout(this.#again);
    this.#reading?.abort();
  }

  #retry(word) {
    this.onState(word, true);
    this.#again = setTimeout(() => this.open(), AGAIN_MS);
  }

  async #read(signal) {
    const query = this.#request === null ? "" : `?request=${this.#request}`;
    const options = { headers: keyHeaders(), signal, cache: "no-store" };
    const reply = await fetch(`/events${query}`, options);
    if (reply.status === 401) {
      this.onState("an API key is needed", true);
      this.onLocked();
      return;
    }
    if (!reply.ok) {
      if (reply.status === 404) this.#request = null; // it has ended, so go on without its tree
      this.#retry((await reply.json()).error.message);
      return;
    }
    this.onState("connected", false);
    for await (const { name, data } of serverSentEvents(reply)) {
      if (signal.aborted) return;
      this.onEvent(name, JSON.parse(data));
    }
    if (!signal.aborted) this.#retry("the server has ended; trying again");
  }
}
