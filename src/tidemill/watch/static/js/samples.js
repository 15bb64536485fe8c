// Samples: found, sorted, and seen side by side with the others of their group, token by token where tokens were kept.
import { get, h, number, replace } from "./dom.js";

const PAGE = 50;
const SORTS = { "-step": "newest", step: "oldest", "-reward": "highest reward", reward: "lowest reward", "-length": "longest", length: "shortest", prompt: "prompt" };
const order = {
  reward: (s) => s.reward ?? 0, length: (s) => (s.response ?? "").length + (s.prompt ?? "").length, prompt: (s) => s.prompt ?? "",
};

function merged(kept, fresh, sort) {
  const value = order[sort.replace("-", "")];
  const sign = sort.startsWith("-") ? -1 : 1;
  const all = [...kept, ...fresh].sort((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : b.at - a.at));
  return all.slice(0, PAGE);
}

export async function open(body, { runs }) {
  const run = runs[0];
  const field = (type, label, more = {}) => h("input", { type, "aria-label": label, placeholder: label, ...more });
  const text = field("search", "search prompts and responses");
  const from = field("number", "from step", { min: "0" }), to = field("number", "to step", { min: "0" });
  const sort = h("select", { "aria-label": "sort" }, Object.entries(SORTS).map(([key, label]) => h("option", { value: key }, label)));
  const correct = h("select", { "aria-label": "correct" }, h("option", { value: "" }, "all"), h("option", { value: "true" }, "correct"), h("option", { value: "false" }, "wrong"));
  const told = h("p", { class: "dim", role: "status" });
  const list = h("div", { role: "list", id: "samples" });
  const more = h("button", { type: "button" }, "more");
  let found = [], cursor = null, turn = 0, isFresh = false;

  const asked = () => ({ run, q: text.value, sort: sort.value, from: from.value, to: to.value, correct: correct.value, n: PAGE });
  const isSorted = () => !sort.value.endsWith("step");

  async function search() {
    found = [];
    cursor = null;
    replace(list);
    await next(++turn);
  }

  async function next(own = turn) {
    let first = found.length;
    do {
      const page = await get("samples", { ...asked(), cursor });
      if (own !== turn) return;
      cursor = page.cursor;
      if (isSorted()) {
        found = merged(found, page.samples, sort.value);
        replace(list, found.map(row));
      } else {
        found.push(...page.samples);
        list.append(...page.samples.map(row));
      }
      told.textContent = `${number(found.length)} shown${cursor === null ? "" : `, ${number(100 * page.done, 3)} % of this stretch read`}`;
      more.hidden = cursor === null;
    } while (cursor !== null && !isSorted() && found.length - first < PAGE);
    if (!found.length) told.textContent = "no sample matches";
    more.textContent = isSorted() ? "look further back" : "more";
  }

  function row(sample) {
    const made = h("button", { type: "button", class: "sample", role: "listitem", "aria-expanded": "false", "data-at": sample.at, onclick: () => toggle(made, sample) },
      h("span", { class: "dim" }, number(sample.step)), h("span", { class: sample.correct ? "good" : "" }, number(sample.reward, 3)),
      h("span", { class: "prompt dim" }, (sample.prompt ?? "").replaceAll("\n", " ⏎ ")), h("span", {}, (sample.response ?? "").replaceAll("\n", " ⏎ ")));
    return made;
  }

  async function toggle(made, sample) {
    const isOpen = made.getAttribute("aria-expanded") === "true";
    made.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) return made.nextElementSibling?.matches(".detail") && made.nextElementSibling.remove();
    const box = h("div", { class: "detail" });
    made.after(box);
    box.append(detail(run, sample, await get("group", { run, at: sample.at })));
  }

  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!step) return;
    const rows = [...list.querySelectorAll(".sample")];
    rows[rows.indexOf(document.activeElement.closest(".sample")) + step]?.focus();
    event.preventDefault();
  });
  more.addEventListener("click", () => next());
  new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && cursor !== null && !isSorted() && found.length < 1000 && next()).observe(more);
  const form = h("form", { class: "bar", role: "search" }, text, sort, correct, from, to, h("button", {}, "find"));
  form.addEventListener("submit", (event) => (event.preventDefault(), search()));
  sort.addEventListener("change", search);
  correct.addEventListener("change", search);
  const anew = h("button", { type: "button", hidden: true, onclick: () => ((anew.hidden = true), search()) }, "show new samples");
  replace(body, h("h1", {}, "Samples of ", run), form, anew, told, list, h("div", { class: "bar" }, more));
  await search();
  isFresh = true;
  return { refresh: () => { if (isFresh) isFresh = false; else anew.hidden = false; } };
}

function detail(run, chosen, group) {
  const rewards = group.map((one) => one.reward ?? 0);
  const mean = rewards.reduce((a, b) => a + b, 0) / Math.max(1, rewards.length);
  const spread = Math.sqrt(rewards.reduce((sum, r) => sum + (r - mean) ** 2, 0) / Math.max(1, rewards.length)) || 1;
  const has = (name) => group.some((one) => one.pieces && one[name]);
  const kinds = ["plain", "advantage", ...(has("logprobs") ? ["log-prob"] : []), ...(has("ratio") ? ["ratio"] : []),
    ...(group.some((one) => one.pieces) ? ["version", "mask"] : [])];
  const pick = h("select", { "aria-label": "colour tokens by" }, kinds.map((kind) => h("option", {}, kind)));
  const cards = h("div", { class: "group", tabindex: "0", "aria-label": "the group side by side" });
  const paint = () => replace(cards, group.map((one) => card(run, one, one.at === chosen.at, (one.reward - mean) / spread, pick.value)));
  pick.addEventListener("change", paint);
  paint();
  return h("div", {}, h("div", { class: "text card" }, chosen.prompt ?? ""),
    h("p", { class: "dim" }, chosen.answer ? `answer: ${chosen.answer}; ` : "", `${group.length} kept samples of this group, mean reward ${number(mean, 3)}`),
    h("div", { class: "bar" }, h("label", {}, "colour by", pick)), cards);
}

function card(run, sample, isChosen, advantage, kind) {
  const parts = Object.entries(sample.rewards ?? {}).map(([name, value]) => `${name} ${number(value, 3)}`).join(", ");
  const shown = sample.images ?? [];
  return h("article", { class: "card", "aria-current": isChosen ? "true" : null },
    h("h3", { class: sample.correct ? "good" : "" }, `reward ${number(sample.reward, 3)}${isChosen ? " · chosen" : ""}`),
    h("small", {}, [parts, sample.finish, sample.versions ? `versions ${sample.versions.join(", ")}` : ""].filter(Boolean).join(" · ")),
    sample.error ? h("p", { class: "bad" }, sample.error) : null,
    shown.length ? h("div", { class: "bar" }, shown.map((name, i) => h("img", { src: `api/image?${new URLSearchParams({ run, name })}`, alt: `image ${i + 1} of the sample`, loading: "lazy" }))) : null,
    sample.pieces ? turns(sample).map(({ isOwn, from, to }) =>
      h("div", { class: isOwn ? "text" : "text given", "aria-label": isOwn ? null : "not made by the model" },
        sample.pieces.slice(from, to).map((piece, i) => token(sample, piece, from + i, advantage, kind)))) :
      h("div", { class: "text" }, plain(sample, advantage, kind)));
}

// What the model made, and between it what tools, an environment or a user answered.
function turns(sample) {
  const found = [];
  sample.pieces.forEach((_, i) => {
    const isOwn = sample.mask?.[i] !== 0;
    if (found.at(-1)?.isOwn === isOwn) found.at(-1).to = i + 1;
    else found.push({ isOwn, from: i, to: i + 1 });
  });
  return found;
}

function tint(strength, isGood) {
  return `rgba(${isGood ? "26, 140, 80" : "200, 50, 40"}, ${Math.min(0.6, Math.max(0, strength))})`;
}

function plain(sample, advantage, kind) {
  const made = h("span", { class: "tok" }, sample.response ?? "");
  if (kind === "advantage") made.style.background = tint(Math.abs(advantage) / 3, advantage > 0);
  return made;
}

function token(sample, piece, i, advantage, kind) {
  const made = h("span", { class: "tok" }, piece), isOwn = sample.mask?.[i] !== 0;
  const own = sample.advantages?.[i] ?? advantage, version = sample.token_versions?.[i] ?? sample.versions?.[0];
  made.title = [sample.logprobs ? `log-prob ${number(sample.logprobs[i], 3)}` : "", sample.ratio ? `ratio ${number(sample.ratio[i], 4)}` : "",
    sample.advantages ? `advantage ${number(own, 3)}` : "", version === undefined ? "" : `version ${version}`, isOwn ? "" : "not learned from"].filter(Boolean).join(", ");
  if (kind === "mask") made.classList.toggle("off", !isOwn);
  if (kind === "version" && version !== undefined) made.style.borderBottom = `2px solid var(--c${version % 8})`;
  if (!isOwn) return made;
  if (kind === "advantage") made.style.background = tint(Math.abs(own) / 3, own > 0);
  if (kind === "log-prob" && sample.logprobs) made.style.background = tint(-sample.logprobs[i] / 6, false);
  if (kind === "ratio" && sample.ratio) made.style.background = tint(Math.abs(Math.log(sample.ratio[i])) / 0.3, sample.ratio[i] > 1);
  return made;
}
