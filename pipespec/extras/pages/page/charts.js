// What happened in the last hour.

import uPlot from "./uplot/uPlot.esm.js";
import { byId, write } from "./dom.js";

const HEIGHT = 150;
const SHORTEST_S = 60; // that the time axis shows
const TICK = 90; // pixels between times
const CHARTS = [
  ["speed", "tokensPerSecond", 1],
  ["gain", "tokensPerStep", 2],
];
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const timeOf = (seconds) => clock.format(new Date(1000 * seconds));

export class Charts {
  #plots = [];

  constructor(history) {
    this.history = history;
    this.#draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    new ResizeObserver(() => this.#fit()).observe(byId("speed"));
  }

  update() {
    for (const { plot, id, name, digits } of this.#plots) {
      const values = this.history[name];
      plot.setData([this.history.time, values]);
      byId(`${id}-card`).hidden = !values.some((value) => value !== null);
      this.#read(plot, id, digits);
    }
    this.#fit();
  }

  /** Write the value below the pointer, or the newest. */
  #read(plot, id, digits) {
    const [times, values] = plot.data;
    const { idx } = plot.cursor;
    const place = idx ?? values.length - 1;
    const value = values[place] ?? null;
    const when = idx === null || idx === undefined ? "" : ` at ${timeOf(times[place])}`;
    write(byId(`${id}-value`), value === null ? "" : `${value.toFixed(digits)}${when}`);
  }

  #draw() {
    const style = getComputedStyle(document.documentElement);
    const [ink, line, colour] = ["--soft", "--line", "--decided"].map((name) =>
      style.getPropertyValue(name).trim(),
    );
    for (const { plot } of this.#plots) plot.destroy();
    this.#plots = CHARTS.map(([id, name, digits]) => {
      const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
      const options = {
        width: byId(id).clientWidth || 300,
        height: HEIGHT,
        axes: [
          { ...axis, space: TICK, values: (_, ticks) => ticks.map(timeOf) },
          { ...axis, size: 55 },
        ],
        scales: {
          x: { range: (_, least, most) => [Math.min(least, most - SHORTEST_S), most] },
          y: { range: (_, least, most) => [0, Math.max(most ?? 0, 0.5) * 1.1] },
        },
        series: [
          {},
          { stroke: colour, width: 2, fill: `${colour}22`, points: { show: false } },
        ],
        cursor: { drag: { x: false, y: false }, y: false },
        legend: { show: false },
        hooks: { setCursor: [(plot) => this.#read(plot, id, digits)] },
      };
      const { time, [name]: values } = this.history;
      const plot = new uPlot(options, [time, values], byId(id));
      return { plot, id, name, digits };
    });
  }

  #fit() {
    for (const { plot } of this.#plots) {
      const width = plot.root.parentElement.clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }
}
