// The flow: stages with what is ready, leased and done, who waits for whom, and where the time of a step goes.
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

function timeline(last) {
  // Without begin and end of each piece of work, bars are the seconds of each stage, in the order of the flow.
  const whole = last["time/step"] || 1;
  let at = 0;
  return Object.keys(last).filter((name) => name.startsWith("time/") && name !== "time/step").map((name) => name.slice(5))
    .sort((a, b) => place(a) - place(b)).map((name) => {
      const share = (last[`time/${name}`] ?? 0) / whole;
      const bar = h("i", { title: `${name}: ${number(last[`time/${name}`], 3)} s` });
      bar.style.left = `${100 * Math.min(0.995, at)}%`;
      bar.style.width = `${100 * Math.min(share, 1 - Math.min(0.995, at))}%`;
      at = Math.min(1, at + share);
      return h("div", { class: "lane" }, h("span", {}, name), h("div", { class: "track" }, bar));
    });
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
  const top = h("div", {});
  const write = async () => {
    const { status, last, state } = await get("flow", { run: runs[0] });
    const told = waits(status);
    replace(top, h("h1", {}, "Flow of ", runs[0]),
      state === "running" && status.open ? h("p", { class: "dim" }, `open: ${status.open.join(", ") || "no stage"}; workers lost so far: ${status.lost}`) : null,
      stages(status, last),
      told.length ? h("ul", {}, told.map((text) => h("li", {}, text))) : null,
      h("h2", {}, `Where the ${number(last["time/step"], 3)} s of step ${number(last.step)} went`), timeline(last),
      status.workers?.length ? [h("h2", {}, "Workers"), table(["worker", "state", "doing", "for", "weights", "leases", "restarts"],
        status.workers.map((w) => [w.name, w.state, w.doing || "–", `${number(Math.round(w.for_s))} s`, w.version < 0 ? "–" : String(w.version), String(w.leases), String(w.restarts)]))] : null);
  };
  await write();
  const info = await get("run", { run: runs[0] });
  const named = (start) => info.metrics.filter((name) => name.startsWith(start));
  const charts = new Charts(runs, [
    { title: "Seconds by stage", names: named("time/") }, { title: "Idle shares", names: named("idle/") },
    { title: "Rows and leases", names: info.metrics.filter((name) => /^(stale_samples|expired_leases|dropped_samples|resumed_samples|workers_lost)$/.test(name)) },
    { title: "Bytes", names: info.metrics.filter((name) => /bytes/.test(name) && !name.startsWith("machine/")) },
  ].filter((chart) => chart.names.length));
  body.append(top, h("h2", {}, "Over the steps"), charts.element);
  await charts.load();
  return { refresh: () => Promise.all([write(), charts.load(false)]), recolour: () => charts.recolour(), close: () => charts.close() };
}
