// Weights: what publishes cost, which versions samples came from, and the checkpoints on disk.
import { Charts } from "./charts.js";
import { bytes, get, h, number, replace, table } from "./dom.js";

export async function open(body, { runs }) {
  const top = h("div", {});
  const write = async () => {
    const { checkpoints } = await get("weights", { run: runs[0] });
    replace(top, h("h1", {}, "Weights of ", runs[0]), h("h2", {}, "Checkpoints"), checkpoints.length ?
      table(["step", "bytes", "metric", "best", "written"], checkpoints.map((one) =>
        [String(one.step), bytes(one.bytes), number(one.metric), one.best ? "best" : "", new Date(1000 * one.written).toLocaleString()])) :
      h("p", { class: "dim" }, "none yet"));
  };
  await write();
  const info = await get("run", { run: runs[0] });
  const matching = (pattern) => info.metrics.filter((name) => pattern.test(name));
  const charts = new Charts(runs, [
    { title: "Version", names: matching(/^version$/) }, { title: "Seconds of a publish", names: matching(/^time\/(publish|hand_over|load)/) },
    { title: "Bytes of a publish", names: matching(/^machine\/weight_bytes|^reshard\//) }, { title: "Staleness", names: matching(/staleness|stale_samples|resumed_samples/) },
    { title: "Skipped updates", names: matching(/skipped_updates$/) },
  ].filter((chart) => chart.names.length));
  body.append(top, h("h2", {}, "Publishes"), charts.element);
  await charts.load();
  return { refresh: () => Promise.all([write(), charts.load(false)]), recolour: () => charts.recolour(), close: () => charts.close() };
}
