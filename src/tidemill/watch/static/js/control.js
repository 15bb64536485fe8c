// Steering: every command is confirmed first, and what came of it stays in a log.
import { h, number, post, replace, table } from "./dom.js";

const SETTINGS = { "learn.lr": "learning rate", "rollout.temperature": "temperature", "algorithm.kl.coef": "KL weight" };
const WORDS = {
  pause: "Pause before the next step?", resume: "Go on?", stop: "Stop after this step and save a checkpoint?",
  save: "Save a checkpoint before the next step?", evaluate: "Evaluate before the next step?",
};

function confirmed(question) {
  return new Promise((resolve) => {
    const box = h("dialog", { "aria-label": question },
      h("p", {}, question),
      h("form", { method: "dialog", class: "bar" },
        h("button", { value: "yes", autofocus: true }, "Yes"), h("button", { value: "no" }, "No")));
    box.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      box.close(event.submitter?.value ?? "no");
    });
    box.addEventListener("close", () => (box.remove(), resolve(box.returnValue === "yes")));
    document.body.append(box);
    box.showModal();
  });
}

export function controls(run) {
  const told = h("span", { role: "status", class: "dim" });
  const log = h("div", {});
  const ask = async (question, command) => {
    if (!(await confirmed(question))) return;
    try {
      await post("control", { run, ...command });
      told.textContent = `asked: ${command.key ? `${command.key} = ${command.value}` : command.kind}`;
    } catch (error) {
      told.textContent = error.message;
    }
  };
  const buttons = Object.fromEntries(Object.entries(WORDS).map(([kind, question]) =>
    [kind, h("button", { type: "button", "data-kind": kind, onclick: () => ask(question, { kind }) }, kind === "stop" ? "stop and save" : kind === "save" ? "save now" : kind === "evaluate" ? "evaluate now" : kind)]));
  const key = h("select", { "aria-label": "setting" }, Object.entries(SETTINGS).map(([name, label]) => h("option", { value: name }, label)));
  const value = h("input", { "aria-label": "new value", inputmode: "decimal", placeholder: "1e-6", size: "8" });
  const set = h("button", { type: "button", "data-kind": "set", onclick: () =>
    ask(`Change ${SETTINGS[key.value]} to ${value.value} from the next step on?`, { kind: "set", key: key.value, value: value.value }) }, "change");
  const workers = h("input", { type: "number", min: "1", "aria-label": "rollout workers", placeholder: "workers" });
  const scale = h("button", { type: "button", "data-kind": "scale", onclick: () =>
    ask(`Run with ${workers.value} rollout workers?`, { kind: "scale", value: workers.value }) }, "scale");
  const element = h("section", { class: "card", "aria-label": "Steering" },
    h("div", { class: "bar" }, Object.values(buttons)), h("div", { class: "bar" }, key, value, set, workers, scale, told), log);
  return {
    element,
    show(info) {
      const runs = info.state === "running";
      for (const button of element.querySelectorAll("button")) button.disabled = !runs;
      buttons.pause.hidden = info.is_paused;
      buttons.resume.hidden = !info.is_paused;
      replace(log, info.control.length ? table(["step", "what", "value", "outcome"],
        info.control.slice(-8).reverse().map((one) => [String(one.step), one.key || one.kind, one.key ? number(one.value) : "", one.refused || "done"])) : null);
    },
  };
}
