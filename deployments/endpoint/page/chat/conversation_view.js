// Drawing of the conversation that is shown.

import { $, element, icon, iconButton, makeButton } from "../shared/elements.js";
import { askAgain, goOn, showVersion } from "./asking.js";
import { drawComposer, drawHint, edit } from "./composer.js";
import { redrawList } from "./conversation_list.js";
import { copyButton } from "./copying.js";
import { drawMarkdown } from "./markdown.js";
import { mediumButton } from "./media_view.js";
import { mediaOf, textOf } from "./messages.js";
import { state, toldMessages } from "./state.js";
import { drawMeasures } from "./waterfall.js";

export const log = $("log");

export const FROM = { user: "You", system: "System", assistant: "Answer" };
export const speakerOf = ({ role, model }) => model ?? FROM[role];
export const articles = new WeakMap(); // by message

export function drawMessage(message) {
  const { role, problem } = message;
  const article = element("article", { className: problem ? `${role} failed` : role },
    element("h2", { className: role === "user" ? "hidden" : "from" }, speakerOf(message)),
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

function answerNodes(message) {
  const { role, content, note, failure, isPartial, measures } = message;
  const text = element("div.content");
  if (content) drawMarkdown(text, content);
  else if (role === "assistant") text.append(element("p.note", "The answer is empty."));
  const foot = element("div.foot",
    measures ? drawMeasures(measures) : null,
    role === "assistant" && content ? copyButton("Copy the answer", content) : null,
    message.others ? versionButtons(message) : null);
  const more = isPartial && content ? makeButton("button retry", goOn, icon("send"), "Continue") : null;
  return [message.thoughts ? thoughtsOf(message, false) : null, text,
    failure ? drawProblem(failure, "Ask again", more) : null,
    note ? element("div.row", element("p.note", note), more) : null,
    foot.firstChild ? foot : null];
}

function drawProblem({ title, message, detail }, retry = "Retry", more = null) {
  return element("div.problem", element("strong", title), element("p", message),
    detail ? element("small", detail) : null,
    element("div.row", more, makeButton("button retry", askAgain, icon("again"), retry)));
}

/** What the model thinks before it answers, folded. */
export function thoughtsOf(reply, isGrowing) {
  const summary = element("summary", isGrowing ? "Thinking…" : "Thoughts");
  const thoughts = element("details.thoughts", { hidden: true }, summary, element("div"));
  drawThoughts(thoughts, reply);
  return thoughts;
}

export function drawThoughts(thoughts, { thoughts: text, content }) {
  thoughts.hidden = !text;
  if (content) thoughts.firstChild.textContent = "Thoughts";
  if (text) drawMarkdown(thoughts.lastChild, text);
}

/** All answers to the last question, in the order in which they came. */
export function allVersions({ others = [], place = 0, ...own }) {
  return others.toSpliced(place, 0, own);
}

/** Leads from one answer to the next, where there are several to the last question. */
function versionButtons({ others, place }) {
  const turn = (name, label, to) => {
    const button = iconButton(name, label, () => showVersion(to));
    button.disabled = to < 0 || to > others.length;
    return button;
  };
  return element("span.versions", turn("before", "Answer before", place - 1),
    element("span", `${place + 1} of ${others.length + 1}`), turn("after", "Next answer", place + 1));
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

function isEndInSight() {
  const { scrollTop, scrollHeight, clientHeight } = $("scroll");
  return scrollHeight - scrollTop - clientHeight < 80;
}

/** Shows the way to the end where it is out of sight. */
export const drawEnd = () => { $("to-end").hidden = isEndInSight(); };

/** Shows the buttons of possible actions. */
export function drawControls() {
  redrawList();
  const isAsking = state.current.asking !== null;
  const last = state.current.messages.at(-1);
  $("welcome").hidden = log.childElementCount > 0;
  $("send").hidden = isAsking;
  $("stop").hidden = !isAsking;
  for (const button of log.querySelectorAll(".edit, .retry")) button.disabled = isAsking;
  drawEnd();
  $("again").hidden = isAsking || !["assistant", "user"].includes(last?.role)
    || Boolean(last.problem ?? last.failure);
  $("again").lastElementChild.textContent = last?.role === "user" ? "Ask again" : "Regenerate";
  $("export").disabled = toldMessages(state.current).length === 0;
  drawHint();
}

/** Calls `act`, which changes the conversation. If its end was in sight before, scrolls to the new end. */
export function atTheEnd(act) {
  const wasInSight = isEndInSight();
  act();
  if (wasInSight) scrollToEnd();
  drawEnd();
}
