// What happened over time.

import uPlot from "./uplot/uPlot.esm.js";
import { byId } from "./dom.js";

const HEIGHT = 150;
const CHARTS = [
  ["speed", "tokens per second", "tokensPerSecond", 1],
  ["gain", "tokens per step", "tokensPerStep", 2],
];

export class Charts {
  #plots = [];

  constructor(history) {
    this.history = history;
    this.#draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    new ResizeObserver(() => this.#fit()).observe(byId("speed"));
  }

  update() {
    for (const [plot, name] of this.#plots) {
      plot.setData([this.history.time, this.history[name]]);
    }
  }

  #draw() {
    const style = getComputedStyle(document.documentElement);
    const [ink, line, colour] = ["--soft", "--line", "--decided"].map((name) =>
      style.getPropertyValue(name).trim(),
    );
    for (const [plot] of this.#plots) plot.destroy();
    this.#plots = CHARTS.map(([id, label, name, digits]) => {
      const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
      const value = (_, found) => (found == null ? "–" : found.toFixed(digits));
      const options = {
        width: byId(id).clientWidth || 300,
        height: HEIGHT,
        axes: [{ ...axis }, { ...axis, size: 55 }],
        scales: { y: { range: (_, least, most) => [0, Math.max(most ?? 0, 0.5) * 1.1] } },
        series: [{}, { label, stroke: colour, width: 2, fill: `${colour}22`, value }],
        cursor: { drag: { x: false, y: false } },
      };
      return [new uPlot(options, [this.history.time, this.history[name]], byId(id)), name];
    });
  }

  #fit() {
    for (const [plot] of this.#plots) {
      const width = plot.root.parentElement.clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }
}
