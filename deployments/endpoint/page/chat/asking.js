// Asking a question and receiving its answer.

import { copyOf, element, icon, makeButton } from "../shared/elements.js";
import { drawComposer, endEditing, focusQuestion, giveBack } from "./composer.js";
import {
  allVersions, articles, atTheEnd, drawControls, drawConversation, drawMessage, drawThoughts, log, scrollToEnd,
  speakerOf, thoughtsOf,
} from "./conversation_view.js";
import { adopt, touch } from "./conversations.js";
import { drawMarkdown } from "./markdown.js";
import { contentOf, mediaOf } from "./messages.js";
import { model } from "./models.js";
import { announcer, notify, removeErrors, say } from "./notices.js";
import { Problem, STOPPED, eventsOf, post } from "./server.js";
import { settingsAreValid } from "./settings.js";
import { composed, isShown, nothing, state, toldMessages } from "./state.js";
import { keepConversation, keepDraft, keepPartial } from "./storage.js";
import { seconds } from "./time.js";

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** The answer's stream. A busy server is asked once more, after its Retry-After or at the reader's click. */
async function answerStream(conversation, signal, view, begun) {
  try {
    return await post(conversation, signal, begun);
  } catch (problem) {
    if (!problem.isBusy) throw problem;
    await countDown(problem, signal, view);
    return post(conversation, signal, begun);
  }
}

async function countDown(problem, signal, view) {
  const counter = element("span");
  let press;
  const pressed = new Promise((resolve) => { press = () => resolve(true); });
  const now = makeButton("button", press, icon("again"), "Retry now");
  const box = element("div", { className: "problem busy" },
    element("strong", problem.title), element("p", problem.message), element("p", counter), now);
  atTheEnd(() => view.article.append(box));
  say(`${problem.title}. It is asked again in ${counted(problem.retryAfter, "second")}.`);
  try {
    for (let left = problem.retryAfter, isPressed = false; left > 0 && !isPressed; left--) {
      counter.textContent = `It is asked again in ${counted(left, "second")}.`;
      isPressed = await Promise.race([seconds(1, signal), pressed]);
    }
  } finally {
    if (box.contains(document.activeElement)) focusQuestion();
    box.remove();
  }
}

/** Fills `reply` from the stream and shows it. */
async function receive(conversation, reply, signal, view) {
  const questions = toldMessages(conversation).filter(({ role }) => role === "user");
  const numPictures = questions.flatMap(({ content }) => mediaOf(content)).length;
  const response = await answerStream(conversation, signal, view, reply.content);
  let timings, usage;
  for await (const event of eventsOf(response, signal)) {
    if (event.error) throw new Problem("The server failed", event.error.message, { detail: event.error.code ?? "" });
    const choice = event.choices[0];
    reply.thoughts += choice?.delta.reasoning_content ?? "";
    reply.content += choice?.delta.content ?? "";
    if (choice?.finish_reason === "length") {
      Object.assign(reply, { note: "The answer ends at the limit of tokens.", isPartial: true });
    }
    timings = event.stage_timings ?? timings;
    usage = event.usage ?? usage;
    view.draw();
  }
  if (timings && usage) reply.measures = { timings, usage, numPictures };
}

/** The place of a pending answer. Draws once a frame; neither draws nor speaks while another conversation is shown. */
function replyView(reply) {
  const thoughts = thoughtsOf(reply, true);
  const text = element("div.content", copyOf("pending"));
  const article = element("article.assistant", element("h2.from", speakerOf(reply)), thoughts, text);
  const announce = announcer();
  let frame = 0;
  const drawNow = () => {
    frame = 0;
    if (!article.isConnected) return;
    atTheEnd(() => {
      drawThoughts(thoughts, reply);
      if (reply.content) drawMarkdown(text, reply.content, true);
    });
    announce(reply.content);
  };
  return {
    article,
    draw: () => { frame ||= requestAnimationFrame(drawNow); },
    end: () => {
      cancelAnimationFrame(frame);
      if (article.isConnected) announce(reply.content, true);
    },
  };
}

/** Asks for an answer, or for more of `begun`, also while another conversation is shown. Where nothing comes, calls
 *  `onProblem(reason)`. */
export async function answer(conversation, onProblem, begun = {}) {
  const control = new AbortController();
  const reply = { role: "assistant", content: "", thoughts: "", model: model(conversation)?.id, ...begun };
  const before = reply.content;
  const view = replyView(reply);
  Object.assign(conversation, { asking: control, view });
  log.append(view.article);
  if (before) view.draw();
  drawControls();
  scrollToEnd();
  focusQuestion();
  let ending = null;
  const keeping = setInterval(() => { if (reply.content) keepPartial(conversation, reply); }, 1000);
  try {
    await receive(conversation, reply, control.signal, view);
  } catch (error) {
    ending = error instanceof Problem ? error : new Problem("The page failed", String(error));
    if (control.signal.aborted) ending = STOPPED;
  }
  clearInterval(keeping);
  view.end();
  Object.assign(conversation, { asking: null, view: null });
  if (ending && reply.content === before) {
    view.article.remove();
    onProblem(ending);
  } else {
    if (ending) Object.assign(reply, endOf(ending));
    conversation.messages.push(reply);
    if (isShown(conversation)) atTheEnd(() => view.article.replaceWith(drawMessage(reply)));
  }
  touch(conversation);
  if (isShown(conversation)) atTheEnd(drawControls);
  await keepConversation(conversation);
}

/** What an answer that broke off says of its end. */
function endOf(problem) {
  const { title, message, detail } = problem;
  return { isPartial: true, ...problem === STOPPED ? { note: title } : { failure: { title, message, detail } } };
}

/** Sends the composer's content once all files are read; sends nothing if one cannot be added. */
export async function send() {
  const conversation = state.current;
  if (await conversation.adding === false || !isShown(conversation)) return;
  const { editing, messages } = conversation;
  const { text, media } = composed();
  const content = contentOf(text.trim(), media);
  if (!content || conversation.asking || !settingsAreValid()) return;
  if (editing) conversation.editing = null;
  else conversation.draft = nothing();
  keepDraft(conversation);
  adopt(conversation);
  conversation.messages = [...messages.slice(0, editing?.index), { role: "user", content }];
  touch(conversation);
  keepConversation(conversation);
  removeErrors();
  while (log.children.length >= conversation.messages.length) log.lastElementChild.remove();
  log.append(drawMessage(conversation.messages.at(-1)));
  drawComposer();
  await answerQuestion(conversation, messages);
}

/** Asks the last question, and shows the reason of a missing answer. A question that the reader stops becomes the draft
 *  again, and `before` the messages. */
async function answerQuestion(conversation, before) {
  const message = conversation.messages.at(-1);
  await answer(conversation, (problem) => {
    if (problem === STOPPED) {
      conversation.messages = before;
      giveBack(conversation, message.content);
      if (isShown(conversation)) drawConversation();
      if (isShown(conversation)) say("Stopped. The question is in the composer again.");
      return;
    }
    const { title, detail, isGone } = problem;
    message.problem = { title, message: problem.message, detail, isGone };
    if (isShown(conversation)) {
      atTheEnd(() => articles.get(message).replaceWith(drawMessage(message)));
      say(`${title}. ${problem.message}`);
    } else {
      notify(`“${conversation.title}” got no answer: ${title}.`);
    }
  });
}

/** Asks the last question once more. */
export async function askAgain() {
  const conversation = state.current;
  endEditing();
  const before = conversation.messages;
  const last = before.at(-1);
  if (last.role === "assistant") await regenerate(conversation);
  else {
    delete last.problem;
    articles.get(last).replaceWith(drawMessage(last));
    await answerQuestion(conversation, before.slice(0, -1));
  }
}

/** Asks for another answer, and keeps the last one beside it. */
const regenerate = (conversation) => replaceLast(conversation, (last) => {
  const others = allVersions(last);
  return { others, place: others.length };
});

/** Lets the last answer, which broke off, go on. */
export const goOn = () => replaceLast(state.current, ({ content, thoughts, model: asked, others, place }) =>
  ({ content, thoughts, model: asked, others, place }));

/** Asks for an answer in place of the last one, with the fields of `begin(last)`. Keeps the last if nothing comes. */
async function replaceLast(conversation, begin) {
  const before = conversation.messages;
  conversation.messages = before.slice(0, -1);
  log.lastElementChild.remove();
  await answer(conversation, (problem) => {
    conversation.messages = before;
    if (isShown(conversation)) log.append(drawMessage(before.at(-1)));
    if (problem !== STOPPED) notify(`${problem.title}. ${problem.message}`);
  }, begin(before.at(-1)));
}

/** Shows another answer to the last question. */
export function showVersion(place) {
  const { messages } = state.current;
  const all = allVersions(messages.at(-1));
  messages[messages.length - 1] = { ...all[place], others: all.toSpliced(place, 1), place };
  log.lastElementChild.replaceWith(drawMessage(messages.at(-1)));
  drawControls();
  keepConversation(state.current);
}
