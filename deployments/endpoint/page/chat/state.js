// The state of the page.

import { searchTextOf, titleOf } from "./messages.js";

// A message is {role, content}. A question without an answer has a `problem`, and is not sent with later ones. An
// answer has its `model` and its `thoughts`, and may have `measures`. One that is not whole has `isPartial`, and a `note`
// or a `failure` about its end. Of several answers to a question, the shown one has the `others` and its `place`.
export const state = {
  models: null, // the cards of those that the server offers; null: not known yet
  conversations: [], // all with a question, in any order
  fresh: null, // the conversation without a question
  current: null, // the conversation that is shown
  opening: null, // the conversation to show next, while the browser reads it
};

export const FRESH = "new";
export const nothing = () => ({ text: "", media: [] });

export const newConversation = (id, messages = []) => ({
  id,
  title: titleOf(messages),
  text: searchTextOf(messages),
  isNamed: false, // true: the reader gave the title; false: it is the first question
  model: null, // the name of the chosen one
  changed: Date.now(), // time of the last message
  isKept: false, // whether the browser keeps the present state
  isDeleted: false,
  messages, // null while only the browser has them, like `draft`
  draft: nothing(), // the next question, {text, media}
  editing: null, // an earlier question in the composer, {index, text, media}
  adding: null, // while files are read for the composer: a promise of whether all could be added
  asking: null, // the AbortController of a pending answer
  view: null, // the place of a pending answer
});

export const isShown = (conversation) => conversation === state.current;

/** The messages that the model gets. */
export const toldMessages = ({ messages }) => messages.filter(({ problem }) => !problem);

/** The composer's content: {text, media}. */
export const composed = (conversation = state.current) => conversation.editing ?? conversation.draft;
