// Small helpers: elements, requests, numbers. Text is only ever set as text, so a sample cannot bring markup along.

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

export class Refused extends Error {}

async function answer(response) {
  const found = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Refused([found.error, found.remedy].filter(Boolean).join(": "));
  return found;
}

export async function get(name, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters))
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== null && one !== undefined && one !== "") query.append(key, one);
  return answer(await fetch(`api/${name}?${query}`));
}

export async function post(name, body) {
  const headers = { "content-type": "application/json" };
  return answer(await fetch(`api/${name}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  if (!value) return "–";
  const at = Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${number(value / 1000 ** at, 3)} ${["B", "kB", "MB", "GB", "TB"][at]}`;
}

export function table(head, rows) {
  const cell = (tag) => (value) =>
    h(tag, { class: typeof value === "number" ? "n" : "" }, typeof value === "number" ? number(value) : value ?? "–");
  return h("div", { class: "scroll", tabindex: "0" },
    h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", {}, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell("td")))))));
}
