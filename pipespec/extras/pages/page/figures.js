// What /metrics says, as the server sends it, and what follows from it. Nothing here shows anything.

/** The figures of one moment: by name, each with its labels. */
export class Figures {
  constructor(snapshot) {
    this.at = snapshot.at;
    this.byName = snapshot.figures;
  }

  /** Of a name and labels; null: it is not known. */
  value(name, labels = {}) {
    const found = (this.byName[name] ?? []).find(([its]) =>
      Object.entries(labels).every(([label, value]) => its[label] === value),
    );
    return found ? found[1] : null;
  }

  /** All of a name, each with its labels. */
  all(name) {
    return this.byName[name] ?? [];
  }

  /** One figure over another; null: not known, or over nothing. */
  ratio(over, under, labels = {}) {
    const [a, b] = [this.value(over, labels), this.value(under, labels)];
    return a === null || !b ? null : a / b;
  }

  /** Where a share of a histogram's observations lies below, between its buckets linearly; null:
   * there is none. */
  quantile(name, share) {
    const buckets = this.all(`${name}_bucket`).map(([{ le }, count]) => [
      le === "+Inf" ? Infinity : Number(le),
      count,
    ]);
    const total = buckets.at(-1)?.[1];
    if (!total) return null;
    const rank = share * total;
    let [below, before] = [0, 0];
    for (const [most, count] of buckets) {
      if (count >= rank) {
        if (most === Infinity) return below;
        return below + ((most - below) * (rank - before)) / (count - before);
      }
      [below, before] = [most, count];
    }
    return null;
  }
}

/** How counters rose in the last hour. */
export class History {
  static KEPT_S = 3600;
  // The head tells of itself once a second, not when we ask; so rates are over some seconds.
  static WINDOW_S = 4;

  constructor() {
    this.clear();
  }

  clear() {
    this.moments = [];
    this.time = [];
    this.tokensPerSecond = [];
    this.tokensPerStep = [];
  }

  /** `at` is the server's clock and `time` the one of people, in seconds; null: not known. */
  add(at, time, tokens, steps) {
    const last = this.moments.at(-1);
    // A cluster that is another counts from the beginning, and a server that is another has
    // another clock.
    if (last && (at < last.at || tokens === null || tokens < last.tokens)) this.moments = [];
    if (tokens !== null) this.moments.push({ at, tokens, steps });
    while (this.moments.length > 2 && at - this.moments[1].at >= History.WINDOW_S) {
      this.moments.shift();
    }
    const [first] = this.moments;
    const known = this.moments.length > 1;
    const rose = known ? tokens - first.tokens : null;
    this.time.push(time);
    this.tokensPerSecond.push(known ? rose / (at - first.at) : null);
    this.tokensPerStep.push(known && steps > first.steps ? rose / (steps - first.steps) : null);
    while (this.time[0] < time - History.KEPT_S) {
      for (const column of [this.time, this.tokensPerSecond, this.tokensPerStep]) column.shift();
    }
  }
}
