// Machines: memory, utilisation, power, temperature and speed, by what the run measured; unknown is said.
import { Charts } from "./charts.js";
import { get, h, replace, table } from "./dom.js";

const PARTS = [
  ["Device memory, most by role", /^machine\/device_memory_peak/], ["Device memory in use", /^machine\/device_memory_used/],
  ["Host memory, most by role", /^machine\/host_memory/], ["Utilisation", /^machine\/utilisation/],
  ["Power", /^machine\/power/], ["Temperature", /^machine\/temperature/], ["MFU", /^machine\/mfu/], ["Share of the measured roofline", /^machine\/roofline/], ["Joules per token", /^machine\/joules/],
  ["Network", /^machine\/network/], ["Dock and weights, bytes", /^machine\/(dock|weight)_bytes/],
  ["Tokens per second", /^tokens_per_s$/], ["Cost", /^cost\//],
];

export async function open(body, { runs }) {
  const top = h("div", {});
  const info = await get("run", { run: runs[0] });
  const parts = PARTS.map(([title, pattern]) => ({ title, names: info.metrics.filter((name) => pattern.test(name)).slice(0, 16) }));
  const write = async () => {
    const { status } = await get("flow", { run: runs[0] });
    const unknown = parts.filter((part) => !part.names.length).map((part) => part.title.toLowerCase());
    replace(top, h("h1", {}, "Machines of ", runs[0]),
      unknown.length ? h("p", { class: "dim" }, `unknown here: ${unknown.join(", ")}`) : null,
      status.workers?.length ? table(["worker", "host", "node", "pid", "state", "silent for"],
        status.workers.map((w) => [w.name, w.host, w.node.slice(0, 8), String(w.pid), w.state, `${Math.round(w.silent_s)} s`])) :
        h("p", { class: "dim" }, "All roles run in one process."));
  };
  await write();
  const charts = new Charts(runs, parts.filter((part) => part.names.length));
  body.append(top, charts.element);
  await charts.load();
  return { refresh: () => Promise.all([write(), charts.load(false)]), recolour: () => charts.recolour(), close: () => charts.close() };
}
