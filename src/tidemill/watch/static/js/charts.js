// Charts of thinned curves: several metrics of several runs in one picture, zoomed together, fetched anew when zoomed.
import { get, h, number } from "./dom.js";

const HEIGHT = 190;
const POINTS = 800; // of a curve
const FRESH = 300; // refreshes that only add, before a curve is thinned anew
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A flat curve lies in the middle; any other has a little room above and below.
function span(low, high) {
  if (low === null || high === null) return [0, 1];
  return low === high ? [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)] : uPlot.rangeNum(low, high, 0.1, true);
}

function joined(before, fresh) {
  return Object.fromEntries(Object.entries(fresh).map(([name, [steps, values]]) => {
    const [first, had] = before[name] ?? [[], []];
    const at = steps.findIndex((step) => !(step <= first.at(-1)));  // an evaluation comes after its step's own line
    return [name, at < 0 ? [first, had] : [first.concat(steps.slice(at)), had.concat(values.slice(at))]];
  }));
}

export class Charts {
  // wanted: [{title, names}]; runs: names of runs laid over each other
  constructor(runs, wanted, marks = []) {
    this.runs = runs;
    this.marks = marks; // steps at which a setting was changed
    this.range = null;
    this.found = runs.map(() => ({}));
    this.isWhole = false; // every line of the files is in the curves
    this.added = 0;
    this.turn = 0;
    this.charts = wanted.map((one) => ({ ...one, box: this.box(one), plot: null }));
    this.element = h("div", { class: "cards" }, this.charts.map((chart) => chart.box));
    this.resized = new ResizeObserver(() => this.fit());
    this.resized.observe(this.element);
  }

  box(one) {
    return h("section", { class: "card", "data-chart": one.title, "aria-label": `${one.title} by step` }, h("h3", {}, one.title));
  }

  // Everything once; after that only what is new, until so much is new that buckets are made again.
  async load(whole = true) {
    const turn = ++this.turn; // an answer that a later question has overtaken is not drawn
    const names = [...new Set(this.charts.flatMap((chart) => chart.names))];
    const parts = [];
    for (let i = 0; i < names.length; i += 60) parts.push(names.slice(i, i + 60));
    const range = this.range ? { from: Math.floor(this.range[0]), to: Math.ceil(this.range[1]) } : {};
    const added = !whole && !this.range && this.isWhole && this.added < FRESH;
    const found = await Promise.all(this.runs.map(async (run, r) => {
      const before = added ? this.found[r] : {};
      const from = Math.max(0, ...Object.values(before).map(([steps]) => steps.at(-1) ?? 0));
      const told = await Promise.all(parts.map((name) => get("series", { run, name, points: POINTS, ...range, ...(added ? { from } : {}) })));
      return { isWhole: told.every((one) => one.is_whole), curves: joined(before, Object.assign({}, ...told.map((one) => one.curves))) };
    }));
    if (turn !== this.turn) return;
    this.isWhole = found.every((one) => one.isWhole);
    this.found = found.map((one) => one.curves);
    this.added = added ? this.added + 1 : 0;
    for (const chart of this.charts) this.draw(chart, this.found);
  }

  draw(chart, found) {
    const many = this.runs.length > 1;
    const series = [], tables = [];
    this.runs.forEach((run, r) => chart.names.forEach((name, n) => {
      const [steps, values] = found[r][name] ?? [[], []];
      if (!steps.length) return;
      const ink = style(`--c${(many ? r : n) % 8}`);
      const label = many ? `${run} ${chart.names.length > 1 ? name : ""}` : name;
      const points = { show: steps.length < 3, size: 6 };
      series.push({ label, stroke: ink, width: 1.5, dash: many ? DASHES[n % 4] : [], spanGaps: true, points, value: (_, v) => number(v) });
      tables.push([steps, values]);
    }));
    if (!series.length) return void (chart.box.hidden = true);
    chart.box.hidden = false;
    chart.box.dataset.last = String(Math.max(...tables.map(([steps]) => steps.at(-1))));
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    const key = JSON.stringify(series.map((one) => [one.label, one.stroke]));
    if (chart.plot && chart.key === key) return void chart.plot.setData(data);
    chart.plot?.destroy();
    chart.key = key;
    chart.plot = new uPlot(this.options(series, chart.box), data, chart.box);
  }

  options(series, box) {
    const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
    const thin = { ...axis, size: 58, values: (_, all) => all.map((v) => number(v, 3)) };
    return {
      width: this.width(box), height: HEIGHT, series: [{ label: "step", value: (_, v) => number(v) }, ...series],
      scales: { x: { time: false }, y: { range: (_, low, high) => span(low, high) } },
      axes: [{ ...axis, values: (_, all) => all.map((v) => (Number.isInteger(v) ? number(v) : "")) }, thin],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false } },
      hooks: { setSelect: [(plot) => this.zoom(plot)], ready: [(plot) => plot.over.addEventListener("dblclick", () => this.whole())],
        draw: [(plot) => this.mark(plot)] },
    };
  }

  mark(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = style("--warn");
    ctx.setLineDash([3, 3]);
    for (const step of this.marks) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  zoom(plot) {
    if (plot.select.width < 4) return;
    this.range = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.load();
  }

  whole() {
    this.range = null;
    this.isWhole = false; // what is held is only the stretch that was zoomed to
    this.load();
  }

  width(box) {
    return Math.max(200, box.clientWidth - 26);
  }

  fit() {
    for (const chart of this.charts) if (chart.plot && !chart.box.hidden) chart.plot.setSize({ width: this.width(chart.box), height: HEIGHT });
  }

  recolour() {
    for (const chart of this.charts) chart.key = "";
    return this.load();
  }

  close() {
    this.resized.disconnect();
    for (const chart of this.charts) chart.plot?.destroy();
  }
}
