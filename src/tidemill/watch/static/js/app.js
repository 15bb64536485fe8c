// The frame around the pages: which runs are chosen, which page is shown, and what happens when a run moves on.
import { get, h, replace } from "./dom.js";
import * as compare from "./compare.js";
import * as flow from "./flow.js";
import * as machines from "./machines.js";
import * as overview from "./overview.js";
import * as samples from "./samples.js";
import * as weights from "./weights.js";

const PAGES = { overview, samples, flow, machines, weights, compare };
const REFRESH_MS = 700; // at most one refresh of a page in this time

const main = document.getElementById("page");
const live = document.getElementById("live");
const state = { runs: [], chosen: [], page: "overview", mayControl: false, shown: null, events: null, due: 0, turn: 0 };

function read() {
  const [page, query = ""] = location.hash.slice(1).split("?");
  const asked = new URLSearchParams(query).getAll("run").filter((name) => state.runs.some((run) => run.name === name));
  state.page = page in PAGES ? page : "overview";
  state.chosen = asked.length ? asked.slice(0, 8) : state.runs.slice(0, 1).map((run) => run.name);
}

export function address(page, runs) {
  return `#${page}?${new URLSearchParams(runs.map((run) => ["run", run]))}`;
}

function frame() {
  replace(document.getElementById("nav"), Object.keys(PAGES).map((page, i) =>
    h("a", { href: address(page, state.chosen), "aria-current": page === state.page ? "page" : null, title: `key ${i + 1}` }, page)));
  document.getElementById("runs-label").textContent = state.chosen.join(", ") || "no run";
  replace(document.getElementById("runs-list"), state.runs.map((run) =>
    h("label", {},
      h("input", { type: "checkbox", value: run.name, checked: state.chosen.includes(run.name), onchange: choose }),
      h("span", {}, run.name, " ", h("small", {}, `${run.state}, step ${run.step} of ${run.steps}`)))));
}

function choose() {
  const ticked = [...document.querySelectorAll("#runs-list input:checked")].map((box) => box.value);
  if (ticked.length) location.hash = address(state.page, ticked);
}

async function show() {
  const turn = ++state.turn;
  delete main.dataset.ready;
  read();
  frame();
  document.title = `${state.chosen[0] ?? "no run"} · ${state.page} · Tidemill`;
  state.shown?.close?.();
  state.shown = null;
  listen();
  if (!state.chosen.length) return replace(main, h("p", {}, "There is no run in this folder yet: `tidemill train RECIPE` makes one."));
  const body = h("div", {});
  replace(main, body);
  try {
    const shown = await PAGES[state.page].open(body, { runs: state.chosen, mayControl: state.mayControl, infos: state.runs });
    if (turn !== state.turn) shown?.close?.();
    else state.shown = shown;
  } catch (error) {
    replace(body, h("p", { class: "bad", role: "alert" }, error.message));
  }
  if (turn === state.turn) main.dataset.ready = `${state.page} ${state.chosen.join(" ")}`;
}

function listen() {
  state.events?.close();
  if (!state.chosen.length) return;
  state.events = new EventSource(`api/events?${new URLSearchParams(state.chosen.map((run) => ["run", run]))}`);
  const sizes = {};
  state.events.onmessage = (event) => {
    live.textContent = "● connected";
    const { run, metrics } = JSON.parse(event.data);
    if (metrics < (sizes[run] ?? 0)) state.shown?.recolour?.(); // a resumed run cut its file: everything anew
    sizes[run] = metrics;
    refresh();
  };
  state.events.onerror = () => (live.textContent = "○ no connection");
}

function refresh() {
  if (state.due) return;
  state.due = setTimeout(async () => {
    state.due = 0;
    try {
      await state.shown?.refresh?.();
    } catch (error) {
      live.textContent = `○ ${error.message}`;
    }
  }, REFRESH_MS);
}

function theme(next) {
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("theme", next); } catch { /* a browser without storage forgets it */ }
  state.shown?.recolour?.();
}

function begin() {
  let kept = null;
  try { kept = localStorage.getItem("theme"); } catch { /* the same */ }
  theme(kept ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
    const page = Object.keys(PAGES)[Number(event.key) - 1];
    if (page) location.hash = address(page, state.chosen);
    else if (event.key === "/") document.querySelector("input[type=search]")?.focus(), event.preventDefault();
    else if (event.key === "Escape") document.getElementById("runs").open = false;
  });
  addEventListener("hashchange", show);
}

async function load() {
  const told = await get("runs");
  state.runs = told.runs;
  state.mayControl = told.may_control;
  if (told.chosen) state.runs.sort((a, b) => (b.name === told.chosen) - (a.name === told.chosen));
}

begin();
load().then(show, (error) => replace(main, h("p", { class: "bad", role: "alert" }, error.message)));
setInterval(() => load().then(frame, () => {}), 20000);
