// The server's health.

import { $, element } from "../shared/elements.js";
import { articles } from "./conversation_view.js";
import { loadExamples } from "./examples.js";
import { loadModels, modalities } from "./models.js";
import { say } from "./notices.js";
import { state } from "./state.js";
import { seconds } from "./time.js";

const STATES = { ready: "Ready", starting: "Starting", unresponsive: "Not ready", unreachable: "Unreachable" };
export let lookSoon = () => {};

async function readHealth() {
  const response = await fetch("/health", { cache: "no-store", signal: AbortSignal.timeout(5000) });
  const { ready, stages = {} } = await response.json().catch(() => ({})); // a proxy may have answered
  const worst = ["unresponsive", "starting"].find((one) => Object.values(stages).includes(one));
  return { overall: ready ? "ready" : worst ?? "unresponsive", stages };
}

function drawHealth({ overall, stages }) {
  const item = (name, one) => {
    const node = element("li", element("span.dot"), element("span", name), element("span", STATES[one] ?? one));
    node.firstChild.dataset.state = one;
    return node;
  };
  const names = [...new Set(["preprocess", "encode", "generate", ...Object.keys(stages)])];
  const capitalized = (name) => name[0].toUpperCase() + name.slice(1);
  const items = names.filter((name) => stages[name]).map((name) => item(capitalized(name), stages[name]));
  $("stages").replaceChildren(...(items.length ? items : [item("Server", overall)]));
  $("dot").dataset.state = overall;
  if ($("health").textContent !== STATES[overall]) $("health").textContent = STATES[overall];
}

function sayItIsBack() {
  for (const message of state.current.messages.filter(({ problem }) => problem?.isGone)) {
    message.problem = { title: "The server is back", message: "The question can be asked again." };
    const [title, text] = articles.get(message).querySelector(".problem").children;
    title.textContent = message.problem.title;
    text.textContent = message.problem.message;
    say(`${message.problem.title}. ${message.problem.message}`);
  }
}

/** Polls every ten seconds, every two while the server is not ready, and at once after a failed request. */
export async function watchHealth() {
  for (let wasGone = false;;) {
    const health = await readHealth().catch(() => ({ overall: "unreachable", stages: {} }));
    const isGone = health.overall === "unreachable";
    drawHealth(health);
    if (wasGone && !isGone) {
      state.models = null; // it may serve others now
      sayItIsBack();
    }
    if (!isGone && !modalities()) await loadModels().then(loadExamples, () => {});
    wasGone = isGone;
    const soon = new Promise((resolve) => { lookSoon = resolve; });
    await Promise.race([soon, seconds(health.overall === "ready" ? 10 : 2)]);
  }
}
