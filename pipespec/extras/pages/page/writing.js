// An answer while it is written: what is added to its message, and how often it is drawn.

const REST = 4; // of the time that drawing takes, how much more passes before the next time

/** Add the pieces of an answer to its message, with how long they took. `changed()` after each. */
export async function collect(message, pieces, changed) {
  const asked = performance.now();
  let first = null;
  for await (const { content, reasoning, tokens, reason } of pieces) {
    const now = performance.now();
    message.content += content;
    message.reasoning += reasoning;
    if (tokens) {
      first ??= { at: now, tokens };
      message.figures = {
        tokens,
        atFirst: first.tokens,
        first: (first.at - asked) / 1000,
        seconds: (now - first.at) / 1000,
      };
    }
    if (content && message.reasoning && message.thoughtFor === undefined) {
      message.thoughtFor = (now - asked) / 1000;
    }
    if (reason) message.reason = reason;
    changed();
  }
}

/** Draws what changes: once a frame at most, and no more often than there is time for. */
export class Drawing {
  #timer = 0;
  #frame = 0;
  #cost = 0;

  constructor(draw) {
    this.draw = draw;
  }

  /** Draw soon. */
  request() {
    if (this.#timer || this.#frame) return;
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#frame = requestAnimationFrame(() => {
        this.#frame = 0;
        const began = performance.now();
        this.draw();
        this.#cost = performance.now() - began;
      });
    }, REST * this.#cost);
  }

  /** Draw for the last time. */
  end() {
    clearTimeout(this.#timer);
    cancelAnimationFrame(this.#frame);
    this.draw();
  }
}
