// Drawing of the conversation that is shown.

import { $, element, icon, iconButton, makeButton } from "../shared/elements.js";
import { askAgain } from "./asking.js";
import { drawComposer, drawHint, edit } from "./composer.js";
import { copyButton } from "./copying.js";
import { drawMarkdown } from "./markdown.js";
import { mediumButton } from "./media_view.js";
import { mediaOf, textOf } from "./messages.js";
import { state, toldMessages } from "./state.js";
import { drawMeasures } from "./waterfall.js";

export const log = $("log");

export const FROM = { user: "You", system: "System", assistant: "Answer" };
export const articles = new WeakMap(); // by message

export function drawMessage(message) {
  const { role, problem } = message;
  const article = element("article", { className: problem ? `${role} failed` : role },
    element("h2", { className: role === "user" ? "hidden" : "from" }, FROM[role]),
    ...(role === "user" ? questionNodes(message) : answerNodes(message)),
    problem ? drawProblem(problem) : null);
  articles.set(message, article);
  return article;
}

function questionNodes(message) {
  const media = mediaOf(message.content);
  const text = textOf(message.content);
  const button = iconButton("edit", "Edit the question", () => edit(message), "tool small edit");
  const said = element("div.said", button, text ? element("div.content", element("p", text)) : null);
  const items = media.map((medium, i) => element("li", mediumButton(medium, i)));
  return items.length ? [element("ul.media", ...items), said] : [said];
}

function answerNodes({ role, content, note, measures }) {
  const text = element("div.content");
  if (content) drawMarkdown(text, content);
  else if (role === "assistant") text.append(element("p.note", "The answer is empty."));
  const foot = element("div.foot",
    measures ? drawMeasures(measures) : null,
    role === "assistant" && content ? copyButton("Copy the answer", content) : null);
  return [text, note ? element("p.note", note) : null, foot.firstChild ? foot : null];
}

function drawProblem({ title, message, detail }) {
  return element("div.problem", element("strong", title), element("p", message),
    detail ? element("small", detail) : null, makeButton("button retry", askAgain, icon("again"), "Retry"));
}

export function drawConversation() {
  const { messages, view } = state.current;
  log.replaceChildren(...messages.map(drawMessage), ...(view ? [view.article] : []));
  view?.draw();
  drawComposer();
  drawControls();
  scrollToEnd();
}

export const scrollToEnd = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };

/** Shows the buttons of possible actions. */
export function drawControls() {
  const isAsking = state.current.asking !== null;
  const last = state.current.messages.at(-1);
  $("welcome").hidden = log.childElementCount > 0;
  $("send").hidden = isAsking;
  $("stop").hidden = !isAsking;
  for (const button of log.querySelectorAll(".edit, .retry")) button.disabled = isAsking;
  $("again").hidden = isAsking || !["assistant", "user"].includes(last?.role) || Boolean(last.problem);
  $("again").lastElementChild.textContent = last?.role === "user" ? "Ask again" : "Regenerate";
  $("export").disabled = toldMessages(state.current).length === 0;
  drawHint();
}

/** Calls `act`, which changes the conversation. If its end was in sight before, scrolls to the new end. */
export function atTheEnd(act) {
  const { scrollTop, scrollHeight, clientHeight } = $("scroll");
  act();
  if (scrollHeight - scrollTop - clientHeight < 80) scrollToEnd();
}
