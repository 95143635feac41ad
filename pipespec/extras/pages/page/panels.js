// The parts of the page that show figures: tiles, stages and links, latency, acceptance, faults.

import { byId, count, decimal, figure, keep, make, refresh, seconds, share, show, write } from "./dom.js";
import { explain } from "./glossary.js";

const TILES = [
  ["decoding", "num_requests_running"],
  ["waiting", "num_requests_waiting"],
  ["KV in use", "kv_cache_usage_perc", share],
  ["KV slots held", "kv_slots_held"],
  ["KV slots cached", "kv_slots_retained"],
  ["KV slots", "kv_slots"],
  ["row budget", "row_budget"],
  ["tokens", "decided_tokens_total"],
  ["steps", "steps_total"],
  ["draft rounds", "spec_decode_num_drafts_total"],
  ["preemptions", "num_preemptions_total"],
  ["ranks", "ranks"],
  ["epoch", "epoch"],
];
const SHARES = [0.5, 0.9, 0.99];
const LATENCIES = [
  ["to the first token", "time_to_first_token_seconds"],
  ["between tokens", "inter_token_latency_seconds"],
];
const DEEPEST = 12;
const KINDS = ["decided", "draft", "prompt"];

/** Panels that hear figures once a second, and steps as they come. */
export class Panels {
  constructor() {
    for (const [name, ...what] of TILES) {
      byId("tiles").append(make("div", {}, make("dt", {}, name), figure("dd", ...what)));
    }
    const gain = make("dd", { "data-derived": "decided_tokens_total/steps_total" });
    byId("tiles").append(make("div", {}, make("dt", {}, "tokens per step"), gain));
    for (const [name, histogram] of LATENCIES) {
      const cells = SHARES.map((each) => make("td", { "data-derived": `${histogram}/${each}` }));
      const row = make("tr", {}, make("th", { scope: "row" }, name), ...cells);
      row.append(figure("td", `${histogram}_count`));
      byId("latency").tBodies[0].append(row);
    }
    this.steps = []; // the newest last: epoch, step, and rows by kind
    this.stages = new Map();
  }

  /** Figures have come. */
  figures(figures) {
    this.#stages(figures);
    this.#hits(figures);
    keep(byId("faults"), figures.all("faults_total").map(([{ kind }]) => kind), fault);
    for (const name of ["tiles", "stages", "latency", "hits", "faults"]) refresh(byId(name), figures);
    for (const each of document.querySelectorAll("[data-derived$='_total']")) {
      show(each, figures.ratio(...each.dataset.derived.split("/")), decimal);
    }
    for (const name of ["stages", "faults"]) byId(`${name}-card`).hidden = !byId(name).children.length;
    byId("latency-card").hidden = !figures.value("time_to_first_token_seconds_count");
    for (const cell of document.querySelectorAll("#latency [data-derived]")) {
      const [name, part] = cell.dataset.derived.split("/");
      show(cell, figures.quantile(name, Number(part)), seconds);
    }
  }

  /** Steps have come; none for a while: []. */
  rows(steps) {
    this.steps = steps.length ? [...this.steps, ...steps].slice(-this.stages.size - 1) : [];
    const [epoch, newest] = this.steps.at(-1) ?? [0, 0];
    const batches = new Map(this.steps.map(([e, step, ...rows]) => [`${e}/${step}`, rows]));
    const most = Math.max(1, ...[...batches.values()].map((rows) => rows[0] + rows[1] + rows[2]));
    for (const [rank, { rows, words }] of this.stages) {
      if (!rows) continue;
      const step = newest - rank + 1;
      const found = batches.get(`${epoch}/${step}`) ?? [0, 0, 0];
      found.forEach((number, kind) => (rows.children[kind].style.width = `${(100 * number) / most}%`));
      write(words, `rows: ${found.map((number, kind) => `${number} ${KINDS[kind]}`).join(", ")}`);
    }
  }

  #stages(figures) {
    const places = figures.all("rank_place_info").map(([labels]) => labels);
    const found = keep(byId("stages"), places.map((each) => each.rank), stage);
    this.stages = new Map();
    for (const { rank, host, device, layers } of places) {
      const card = found.get(rank);
      const [where, bar, link] = ["where", "busy", "link"].map((name) => card.querySelector(`.${name}`));
      const info = figures.all("rank_info").find(([labels]) => labels.rank === rank);
      const how = [layers && `layers ${layers}`, host, device, info && info[0].attention];
      write(where, how.filter(Boolean).join(" · "));
      this.stages.set(Number(rank), {
        rows: card.querySelector(".rows"),
        words: card.querySelector(".words"),
      });
      if (rank === "0") continue;
      const busy = figures.value("stage_busy_share", { stage: rank });
      bar.style.width = `${100 * Math.min(busy ?? 0, 1)}%`;
      const late = figures.ratio("stage_receive_seconds_total", "stage_active_seconds_total", { stage: rank });
      write(link, late === null ? "link: –" : `link: waits ${share(late)}`);
    }
  }

  #hits(figures) {
    const depths = figures
      .all("draft_rows_total")
      .map(([{ depth }]) => depth)
      .filter((depth) => Number(depth) <= DEEPEST);
    const rows = keep(byId("hits").tBodies[0], depths, hit);
    byId("hits-card").hidden = !depths.length;
    for (const [depth, row] of rows) {
      const fed = figures.value("draft_rows_total", { depth });
      const rate = fed ? (figures.value("draft_hits_total", { depth }) ?? 0) / fed : null;
      show(row.querySelector("[data-derived]"), rate, share);
      row.querySelector(".bar > span").style.width = `${100 * Math.min(rate ?? 0, 1)}%`;
    }
  }
}

function stage(rank) {
  const head = rank === "0";
  const [name, word] = head ? ["Head", "head"] : [`Stage ${rank}`, "stage"];
  const card = make("li", {}, make("b", { "data-word": word }, name));
  card.append(make("small", { class: "where" }));
  if (head) {
    const rounds = make("span", { "data-derived": "spec_decode_num_drafts_total/steps_total" });
    card.append(make("small", { "data-word": "draft rounds" }, rounds, " draft rounds per step"));
    return explain(card);
  }
  const busy = figure("span", "stage_busy_share", share, { stage: rank });
  card.append(
    make("small", { "data-word": "busy" }, "busy ", busy),
    make("div", { class: "bar" }, make("span", { class: "busy" })),
    make("div", { class: "bar rows" }, ...KINDS.map((kind) => make("span", { class: kind }))),
    make("small", { class: "words" }),
    make("small", { class: "link", "data-word": "waits" }),
  );
  return explain(card);
}

function hit(depth) {
  const bar = make("span", { class: "bar" }, make("span"));
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, depth),
    figure("td", "draft_rows_total", count, { depth }),
    figure("td", "draft_hits_total", count, { depth }),
    make("td", {}, bar, make("span", { "data-derived": `acceptance-rate/${depth}` })),
  );
}

function fault(kind) {
  const words = make("dt", {}, kind.replaceAll("_", " "));
  return explain(make("div", {}, words, figure("dd", "faults_total", count, { kind })));
}
