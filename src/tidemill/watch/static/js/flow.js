// The flow: stages with what is ready, leased and done, who waits for whom, and what every worker did when.
import { Charts } from "./charts.js";
import { get, h, number, replace, table } from "./dom.js";

const ORDER = ["rollout", "reward", "old_logprobs", "reference", "teacher", "values", "advantage", "learn_values", "learn", "publish"];
const place = (name) => (ORDER.indexOf(name) + 1 || 99);

function stages(status, last) {
  const timed = Object.keys(last).filter((name) => name.startsWith("time/") && name !== "time/step").map((name) => name.slice(5));
  const names = [...new Set([...Object.keys(status.stages ?? {}), ...timed])].sort((a, b) => place(a) - place(b));
  return h("div", { class: "stages" }, names.map((name, i) => {
    const counts = status.stages?.[name];
    const busy = (last[`time/${name}`] ?? 0) / (last["time/step"] || 1);
    const meter = h("i", {});
    meter.style.width = `${Math.min(100, 100 * busy)}%`;
    return h("div", { class: "stage", "data-stage": name }, h("b", {}, i ? "→ " : "", name),
      counts ? h("div", {}, h("small", {}, `${number(counts.ready)} ready · ${number(counts.leased)} leased · ${number(counts.done)} done`)) : null,
      h("div", {}, h("small", {}, `${number(last[`time/${name}`], 3)} s, ${number(100 * busy, 3)} % of the step`)),
      h("div", { class: "meter" }, meter));
  }));
}

// One lane a worker, one bar for each piece of work, over one or several steps.
function gantt({ seconds, steps, workers }) {
  if (!steps.length) return h("p", { class: "dim" }, "no step has been written yet (observe.timeline may be off)");
  const span = Math.max(seconds, 1e-6), share = (part) => `${(100 * Math.min(1, Math.max(0, part / span))).toFixed(3)}%`;
  const names = Object.keys(workers).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const kinds = [...new Set(Object.values(workers).flat().map(([what]) => what))].sort((a, b) => place(a) - place(b));
  const lanes = names.map((name) => {
    const track = h("div", { class: "track" });
    for (const [what, begin, end] of workers[name]) {
      const bar = h("i", { "data-what": what, title: `${name}: ${what}, ${number(end - begin, 3)} s, ${number(begin, 3)} s after step ${steps[0].step} began` });
      bar.style.left = share(begin);
      bar.style.width = share(end - begin);
      bar.style.background = `var(--c${kinds.indexOf(what) % 8})`;
      track.append(bar);
    }
    for (const one of steps.slice(1)) {
      const mark = h("b", { class: "mark", title: `step ${one.step}` });
      mark.style.left = share(one.start);
      track.append(mark);
    }
    const busy = workers[name].reduce((sum, [, begin, end]) => sum + end - begin, 0);
    return h("div", { class: "lane", "data-worker": name }, h("span", {}, name, " ", h("small", {}, `${number(100 * Math.min(1, busy / span), 3)} %`)), track);
  });
  const legend = h("div", { class: "legend" }, kinds.map((what) => {
    const spot = h("i", {});
    spot.style.background = `var(--c${kinds.indexOf(what) % 8})`;
    return h("span", {}, spot, what);
  }));
  return h("div", { id: "gantt" }, legend, lanes, h("div", { class: "lane" }, h("span", {}), h("small", { class: "axis" }, h("span", {}, "0 s"), h("span", {}, `${number(span / 2, 3)} s`), h("span", {}, `${number(span, 3)} s`))));
}

function waits(status) {
  const told = [];
  for (const worker of status.workers ?? []) {
    if (worker.state !== "ready") told.push(`${worker.name} is ${worker.state}${worker.error ? `: ${worker.error}` : ""}`);
    else if (worker.waits_in) told.push(`${worker.name} waits in ${worker.waits_in} for the other ranks`);
  }
  const first = Object.entries(status.stages ?? {}).find(([, counts]) => counts.ready || counts.leased);
  if (first) told.push(`everything after ${first[0]} waits for ${number(first[1].ready)} ready and ${number(first[1].leased)} leased rows`);
  return told;
}

export async function open(body, { runs, infos }) {
  const top = h("div", {}), below = h("div", {}), lanes = h("div", { class: "scroll" });
  const step = h("input", { type: "number", min: "1", "aria-label": "step", placeholder: "newest" });
  const count = h("select", { "aria-label": "steps shown" }, [1, 3, 10].map((n) => h("option", { value: n, selected: n === 3 }, `${n} step${n > 1 ? "s" : ""}`)));
  const draw = async () => replace(lanes, gantt(await get("timeline", { run: runs[0], step: step.value, n: count.value })));
  step.addEventListener("change", draw);
  count.addEventListener("change", draw);
  const write = async () => {
    const { status, last, state } = await get("flow", { run: runs[0] });
    const told = waits(status);
    replace(top, h("h1", {}, "Flow of ", runs[0]),
      state === "running" && status.open ? h("p", { class: "dim" }, `open: ${status.open.join(", ") || "no stage"}; workers lost so far: ${status.lost}`) : null,
      stages(status, last),
      told.length ? h("ul", {}, told.map((text) => h("li", {}, text))) : null);
    replace(below, status.workers?.length ? [h("h2", {}, "Workers"), table(["worker", "state", "doing", "for", "weights", "leases", "restarts"],
        status.workers.map((w) => [w.name, w.state, w.doing || "–", `${number(Math.round(w.for_s))} s`, w.version < 0 ? "–" : String(w.version), String(w.leases), String(w.restarts)]))] : null);
    if (!step.value) await draw();
  };
  await write();
  const info = await get("run", { run: runs[0] });
  const named = (start) => info.metrics.filter((name) => name.startsWith(start));
  const charts = new Charts(runs, [
    { title: "Seconds by stage", names: named("time/") }, { title: "Idle shares", names: named("idle/") },
    { title: "Rows and leases", names: info.metrics.filter((name) => /^(stale_samples|expired_leases|dropped_samples|resumed_samples|workers_lost)$/.test(name)) },
    { title: "Rows waited for their stage, seconds", names: named("machine/queue_s/") }, { title: "Share of the measured roofline", names: named("machine/roofline/") },
    { title: "Bytes through the dock and to rollout", names: info.metrics.filter((name) => /^machine\/(dock|weight)_bytes/.test(name)) },
    { title: "Bytes", names: info.metrics.filter((name) => /bytes/.test(name) && !name.startsWith("machine/")) },
  ].filter((chart) => chart.names.length));
  body.append(top, h("h2", {}, "Who did what when"), h("div", { class: "bar" }, h("label", {}, "up to step", step), count), lanes, below, h("h2", {}, "Over the steps"), charts.element);
  await charts.load();
  return { refresh: () => Promise.all([write(), charts.load(false)]), recolour: () => charts.recolour(), close: () => charts.close() };
}
