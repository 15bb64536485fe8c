// Two runs: settings that differ, the first step whose numbers differ, curves laid over each other, the same prompts.
import { Charts } from "./charts.js";
import { get, h, number, replace, table } from "./dom.js";
import { parted } from "./overview.js";

export async function open(body, { runs, infos }) {
  const others = infos.map((info) => info.name).filter((name) => name !== runs[0]);
  if (!others.length) return void replace(body, h("p", {}, "There is only one run here: nothing to compare it with."));
  const pick = h("select", { "aria-label": "compare with" }, others.map((name) => h("option", { selected: name === runs[1] }, name)));
  const found = h("div", {});
  let charts = null;

  async function show() {
    const pair = [runs[0], pick.value];
    const [told, ...info] = await Promise.all([get("compare", { one: pair[0], other: pair[1] }), ...pair.map((run) => get("run", { run }))]);
    charts?.close();
    charts = new Charts(pair, parted([...new Set(info.flatMap((one) => one.metrics))]).parts);
    const first = told.first;
    replace(found,
      h("p", { id: "first" }, first ? `They first differ at step ${number(first.step)}: ${first.name} is ${number(first.one, 8)} in ${pair[0]} and ${number(first.other, 8)} in ${pair[1]}.` : "All steps that both have are equal."),
      h("h2", {}, `${told.settings.length} settings differ`),
      told.settings.length ? table(["setting", ...pair], told.settings.map((one) => [one.key, word(one.one), word(one.other)])) : null,
      h("h2", {}, "Curves"), charts.element, h("h2", {}, "The same prompts"),
      told.prompts.length ? told.prompts.map((one) => h("div", {}, h("div", { class: "text dim" }, one.prompt),
        h("div", { class: "group" }, [one.one, one.other].map((sample, i) => h("article", { class: "card" },
          h("h3", {}, `${pair[i]} · step ${sample.step} · reward ${number(sample.reward, 3)}`), h("div", { class: "text" }, sample.response)))))) :
        h("p", { class: "dim" }, "none among the newest samples"));
    await charts.load();
  }

  pick.addEventListener("change", show);
  replace(body, h("h1", {}, "Compare ", runs[0], " with ", pick), found);
  await show();
  return { refresh: () => charts.load(false), recolour: () => charts.recolour(), close: () => charts.close() };
}

const word = (value) => (value === undefined || value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
