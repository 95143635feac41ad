// The table of open requests.

import { byId, count, keep, make, write } from "./dom.js";
import { cancel } from "./stream.js";

export class Requests {
  #since = new Map(); // when each was seen first, in milliseconds

  /** `watch(request)`: its tree is to be shown. */
  constructor(watch) {
    this.watch = watch;
    this.watched = null;
  }

  show(requests) {
    const now = Date.now();
    const body = byId("requests").tBodies[0];
    const rows = keep(body, requests.map((each) => each.request), (request) => this.#row(request));
    this.#since = new Map(requests.map(({ request }) => [request, this.#since.get(request) ?? now]));
    for (const { request, taken, length, prompt, client, agent, preview, watchable } of requests) {
      const row = rows.get(String(request));
      const [, from, state, asked, answer, age] = row.cells;
      const origin = [client, agent].filter(Boolean).join(" · ");
      write(from.querySelector(".client"), origin || "by another server, or with another key");
      write(from.querySelector(".preview"), preview ?? "");
      from.querySelector(".preview").title = preview ?? "";
      if (!row.dataset.ending) write(state, taken ? "decoding" : "waiting");
      write(asked, prompt === null ? "–" : count(prompt));
      write(answer, prompt === null ? `${count(length)} in all` : count(length - prompt));
      write(age, `${Math.round((now - this.#since.get(request)) / 1000)} s`);
      row.querySelector(".watch").hidden = !watchable;
      row.querySelector(".watch").setAttribute("aria-pressed", String(request === this.watched));
    }
    byId("requests").hidden = !requests.length;
    byId("none-open").hidden = requests.length > 0;
  }

  #row(request) {
    const watch = make("button", { type: "button", class: "watch" }, "Watch");
    watch.setAttribute("aria-label", `Watch the tree of request ${request}`);
    watch.addEventListener("click", () => this.watch(request));
    const end = make("button", { type: "button", class: "cancel" }, "Cancel");
    end.setAttribute("aria-label", `Cancel request ${request}`);
    const from = make("td", {}, make("small", { class: "client" }), make("div", { class: "preview", dir: "auto" }));
    const cells = Array.from({ length: 4 }, () => make("td"));
    const row = make("tr", {}, make("th", { scope: "row" }, String(request)), from, ...cells);
    row.append(make("td", {}, watch, end));
    end.addEventListener("click", async () => {
      end.disabled = true;
      row.dataset.ending = "yes";
      write(row.cells[2], "ending");
      const problem = await cancel(request);
      if (problem === null) return;
      end.disabled = false;
      delete row.dataset.ending;
      end.title = problem;
      write(row.cells[2], problem);
    });
    return row;
  }
}
