// The composer: the next question, or an earlier one that the reader edits.

import { $ } from "../shared/elements.js";
import { drawAttached } from "./attachments.js";
import { log } from "./conversation_view.js";
import { mediaOf, textOf } from "./messages.js";
import { composed, state } from "./state.js";
import { keepDraft } from "./storage.js";

export const question = $("question");

/** Focuses the question, except on touch screens, where a keyboard would cover the page. */
export function focusQuestion() {
  if (!matchMedia("(pointer: coarse)").matches) question.focus();
}

export function drawComposer() {
  const { editing } = state.current;
  question.value = composed().text;
  $("editing").hidden = !editing;
  if (editing) question.setAttribute("aria-describedby", "editing-text");
  else question.removeAttribute("aria-describedby");
  [...log.children].forEach((article, i) => article.classList.toggle("edited", i === editing?.index));
  drawAttached();
  drawHint();
}

export function drawHint() {
  const { asking, editing } = state.current;
  const otherwise = editing ? "Esc leaves the question as it was" : "Enter sends";
  $("hint").textContent = asking ? "Esc stops the answer" : otherwise;
}

/** Brings an earlier question into the composer. The draft returns when the editing ends. */
export function edit(message) {
  const conversation = state.current;
  const index = conversation.messages.indexOf(message);
  conversation.editing = { index, text: textOf(message.content), media: mediaOf(message.content) };
  drawComposer();
  question.focus();
  question.setSelectionRange(question.value.length, question.value.length);
}

export function endEditing() {
  const { editing } = state.current;
  if (!editing) return;
  state.current.editing = null;
  drawComposer();
  log.children[editing.index]?.querySelector(".edit").focus();
}

/** Puts a question back into the draft, before the draft's own content. */
export function giveBack(conversation, content) {
  const { draft } = conversation;
  draft.text = [textOf(content), draft.text].filter(Boolean).join("\n\n");
  draft.media.unshift(...mediaOf(content));
  keepDraft(conversation);
}
