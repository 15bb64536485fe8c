// How a run fares: the curves that tell it first, warnings in words, and the controls where they are allowed.
import { Charts } from "./charts.js";
import { controls } from "./control.js";
import { get, h, number, replace } from "./dom.js";

// Title and the metrics that belong under it, by name or by what their names match.
const PARTS = [
  ["Reward", ["reward", "eval/reward", /^reward\//]],
  ["Accuracy", ["accuracy", "eval/accuracy", /^eval\/(pass@|against)/]],
  ["Loss", ["loss"]],
  ["Response length", ["response_tokens", "eval/response_tokens"]],
  ["Truncated", ["truncated_share"]],
  ["Entropy", ["entropy"]],
  ["KL", ["kl", "old_kl", "kl_coef"]],
  ["Clip shares", [/^clip_share/]],
  ["Gradient norm", ["grad_norm", "critic/grad_norm"]],
  ["Groups without signal", ["equal_reward_groups"]],
  ["Gap between rollout and learner", [/^mismatch\/[^/]+\/(mean|max)$/]],
  ["Staleness", [/staleness/, "stale_samples"]],
  ["Ratio", ["ratio_min", "ratio_mean", "ratio_max"]],
  ["Learning rate", ["lr"]],
  ["Tokens per second", ["tokens_per_s"]],
  ["Turns and tools", ["turns", /^environment\//]],
];

export function parted(names) {
  const taken = new Set();
  const parts = PARTS.map(([title, wanted]) => {
    const own = names.filter((name) => wanted.some((one) => (one instanceof RegExp ? one.test(name) : one === name)));
    own.forEach((name) => taken.add(name));
    return { title, names: own.slice(0, 6) };
  });
  const rest = names.filter((name) => !taken.has(name) && !/^(time|idle|machine|cost)\//.test(name) && name !== "version");
  return { parts: parts.filter((part) => part.names.length), rest };
}

function fact(label, value) {
  return h("div", {}, h("b", {}, value), h("small", {}, label));
}

function head(box, info) {
  const last = info.last;
  const left = info.steps - info.step;
  const share = (value) => (value === undefined ? "–" : `${number(100 * value, 3)} %`);
  replace(box,
    h("h1", {}, info.name, " ", h("small", {}, `${info.state}${info.is_paused ? ", paused" : ""}`)),
    info.about ? h("p", { class: "dim" }, info.about) : null,
    h("div", { class: "facts" },
      fact("step", `${number(info.step)} / ${number(info.steps)}`),
      fact("reward", number(last.reward)), fact("accuracy", share(last["eval/accuracy"] ?? last.accuracy)),
      fact("tokens/s", number(last.tokens_per_s, 3)),
      fact("left", last["time/step"] && left > 0 ? `${number(Math.round((left * last["time/step"]) / 60))} min` : "–"),
      fact("MFU", share(last["machine/mfu"])), fact("J per token", number(last["machine/joules_per_token"], 3)),
      fact("cost so far", number(last["cost/so_far"], 4))),
    info.films.slice(-1).map((name) => h("img", { src: `api/image?${new URLSearchParams({ run: info.name, name })}`, alt: "an episode" })),
    info.warnings.map((text) => h("p", { class: "warning", role: "note" }, text)));
}

export async function open(body, { runs, mayControl }) {
  let infos = await Promise.all(runs.map((run) => get("run", { run })));
  const top = h("div", {});
  const names = [...new Set(infos.flatMap((info) => info.metrics))];
  const { parts, rest } = parted(names);
  const marks = infos.flatMap((info) => info.control.filter((one) => one.kind === "set" && !one.refused).map((one) => one.step));
  const charts = new Charts(runs, parts, marks);
  let more = null;
  const all = h("details", {}, h("summary", {}, `${rest.length} more metrics`));
  all.addEventListener("toggle", async () => {
    if (!all.open || more) return;
    more = new Charts(runs, rest.map((name) => ({ title: name, names: [name] })), marks);
    all.append(more.element);
    await more.load();
  });
  const steer = mayControl ? controls(runs[0]) : null;
  const write = () => {
    head(top, infos[0]);
    steer?.show(infos[0]);
  };
  write();
  replace(body, top, steer?.element, charts.element, h("h2", {}, "Everything else"), all);
  await charts.load();
  return {
    async refresh() {
      infos = await Promise.all(runs.map((run) => get("run", { run })));
      charts.marks.splice(0, charts.marks.length, ...infos.flatMap((info) => info.control.filter((one) => one.kind === "set" && !one.refused).map((one) => one.step)));
      write();
      await Promise.all([charts.load(false), all.open ? more?.load(false) : null]);
    },
    recolour: () => Promise.all([charts.recolour(), more?.recolour()]),
    close: () => (charts.close(), more?.close()),
  };
}
