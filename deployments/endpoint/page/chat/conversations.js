// Several conversations, one of which is shown.

import { focusQuestion } from "./composer.js";
import { drawConversation } from "./conversation_view.js";
import { newId } from "./media.js";
import { searchTextOf, titleOf } from "./messages.js";
import { drawModel } from "./models.js";
import { notify, removeErrors } from "./notices.js";
import { FRESH, newConversation, nothing, state } from "./state.js";
import { forgetHidden, keep, keepDraft, load, read, readList, sayNotKept, sweepMedia } from "./storage.js";

/** Shows the last conversation. Without storage, the page begins empty and notifies the reader. */
export async function restore() {
  try {
    await readList();
    await load(Object.assign(state.fresh, { draft: null }));
    const current = await read("kept", "current");
    const found = state.conversations.find(({ id }) => id === current);
    if (!found || !await show(found)) await show(state.fresh);
    sweepMedia();
  } catch (error) {
    state.fresh.draft ??= nothing();
    await show(state.fresh);
    sayNotKept(error);
  }
}

/** Returns whether the browser could read the conversation. */
export async function show(conversation) {
  state.opening = conversation;
  try {
    await load(conversation);
  } catch (error) {
    notify(`“${conversation.title}” cannot be read (${error.message}).`);
    return false;
  }
  if (state.opening !== conversation) return true; // the reader has gone on to another one meanwhile
  const left = state.current;
  state.current = conversation;
  keepDraft(left);
  forgetHidden(left);
  keep((store) => store("kept").put(conversation.id, "current"));
  removeErrors();
  drawConversation();
  drawModel();
  focusQuestion();
  return true;
}

/** Moves the fresh conversation, which now has a question, to the list, and makes a new fresh one. */
export function adopt(conversation) {
  if (conversation !== state.fresh) return;
  conversation.id = newId();
  state.conversations.push(conversation);
  state.fresh = newConversation(FRESH);
}

/** Updates time and title after a change of messages. */
export function touch(conversation) {
  conversation.changed = Date.now();
  conversation.text = searchTextOf(conversation.messages);
  if (!conversation.isNamed) conversation.title = titleOf(conversation.messages);
}
