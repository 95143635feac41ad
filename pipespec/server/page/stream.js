// The event stream of the server, read with fetch, as EventSource sends no key.

const KEY = "pipespec-key";
const AGAIN_MS = 1000;

export function showKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Have the server end a request; what went wrong as a sentence, or null. */
export async function cancel(request) {
  try {
    const reply = await fetch(`/requests/${request}/cancel`, { method: "POST", headers: headers() });
    return reply.ok ? null : (await reply.json()).error.message;
  } catch {
    return "The server does not answer.";
  }
}

/** Follows /events for as long as the page is open. */
export class Stream {
  #request = null;
  #reading = null;
  #again = 0;

  /** `hear(name, data)` takes events; `state(word, isLost)` is told how it goes; `locked()`: a key
   * is needed. */
  constructor(hear, state, locked) {
    this.hear = hear;
    this.state = state;
    this.locked = locked;
  }

  /** Begin anew, watching the tree of a request; null: of none. */
  watch(request) {
    this.#request = request;
    this.open();
  }

  open() {
    clearTimeout(this.#again);
    this.#reading?.abort();
    const reading = (this.#reading = new AbortController());
    this.#read(reading.signal).catch(() => {
      if (!reading.signal.aborted) this.#retry("no answer; trying again");
    });
  }

  #retry(word) {
    this.state(word, true);
    this.#again = setTimeout(() => this.open(), AGAIN_MS);
  }

  async #read(signal) {
    const query = this.#request === null ? "" : `?request=${this.#request}`;
    const reply = await fetch(`/events${query}`, { headers: headers(), signal, cache: "no-store" });
    if (reply.status === 401) {
      this.state("an API key is needed", true);
      this.locked();
      return;
    }
    if (!reply.ok) {
      this.#retry((await reply.json()).error.message);
      return;
    }
    this.state("connected", false);
    const decoder = new TextDecoder();
    let rest = "";
    for (const reader = reply.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const [name, data] = event.split("\n");
        this.hear(name.slice("event: ".length), JSON.parse(data.slice("data: ".length)));
      }
    }
    if (!signal.aborted) this.#retry("the server has ended; trying again");
  }
}
