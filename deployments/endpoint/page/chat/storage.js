// Storage of conversations in IndexedDB.

import { addMedium, fileOf, isMedium, typeOf } from "./media.js";
import { idsIn } from "./messages.js";
import { notify } from "./notices.js";
import { isShown, newConversation, nothing, state } from "./state.js";
import { remember } from "./uploads.js";

// conversations: the list's entries. messages: of each conversation. media: {type, file, added} by id. kept: "current",
// the shown conversation's id; "draft ID"; "answer ID", the received part of an answer; "name ID", a medium's URL on the
// server.
const STORES = ["conversations", "messages", "media", "kept"];
const LEAST_AGE_MS = 86_400_000; // of media that nothing refers to: another tab may be about to

const database = new Promise((resolve, reject) => {
  const opening = indexedDB.open("raylens", 3);
  opening.onupgradeneeded = () => {
    const { result: base } = opening;
    for (const name of base.objectStoreNames) base.deleteObjectStore(name);
    for (const name of STORES) base.createObjectStore(name);
  };
  opening.onsuccess = () => {
    opening.result.onversionchange = () => opening.result.close(); // else a newer page would wait for this one
    resolve(opening.result);
  };
  opening.onblocked = () => reject(new Error("another tab shows an older page of this server"));
  opening.onerror = () => reject(opening.error);
});

/** Calls `act` with a function from a store's name to the store. Returns the result of the request of `act`. */
async function inStores(mode, act) {
  const transaction = (await database).transaction(STORES, mode);
  const request = act((name) => transaction.objectStore(name));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

export const read = (name, key) => inStores("readonly", (store) => store(name).get(key));

/** Returns whether the browser stored the writes of `act`. Notifies the reader of the first failure. */
export const keep = (act) => inStores("readwrite", act).then(() => true, (error) => {
  sayNotKept(error);
  return false;
});

let saysWhatIsNotKept = true;

export function sayNotKept(error) {
  if (!saysWhatIsNotKept) return;
  const reason = error.name === "QuotaExceededError" ? "there is no more room" : error.message || error.name;
  const loss = "It is gone when the page is closed, unless it is exported.";
  notify(`This browser does not keep what is new here (${reason}). ${loss}`, "info");
  saysWhatIsNotKept = false;
}

const summaryOf = ({ id, title, text, isNamed, model, changed }) => ({ id, title, text, isNamed, model, changed });

export async function keepConversation(conversation) {
  if (conversation.isDeleted) return;
  const { id, messages } = conversation;
  conversation.isKept = false;
  conversation.isKept = await keep((store) => {
    store("conversations").put(summaryOf(conversation), id);
    store("messages").put(messages, id);
    store("kept").delete(`answer ${id}`);
    if (isShown(conversation)) store("kept").put(id, "current");
  });
  forgetHidden(conversation);
}

/** Frees the memory of a stored conversation that is not shown. */
export function forgetHidden(conversation) {
  const { isKept, isDeleted, asking, editing } = conversation;
  if (isKept && !isDeleted && !asking && !editing && !isShown(conversation)) conversation.messages = null;
}

export function keepTitle(conversation) {
  if (conversation.messages) keepConversation(conversation);
  else keep((store) => { store("conversations").put(summaryOf(conversation), conversation.id); });
}

/** Keeps the received part of an answer. */
export function keepPartial({ id, isDeleted }, reply) {
  const partial = { ...reply, note: "Interrupted", isPartial: true };
  if (!isDeleted) keep((store) => store("kept").put(partial, `answer ${id}`));
}

export function keepDraft({ id, draft, isDeleted }) {
  const isEmpty = !draft.text && !draft.media.length;
  const key = `draft ${id}`;
  if (!isDeleted) keep((store) => isEmpty ? store("kept").delete(key) : store("kept").put(draft, key));
}

export const keepMedium = (id) => keep((store) => {
  store("media").put({ type: typeOf(id), file: fileOf(id), added: Date.now() }, id);
});

/** A conversation's media: of its messages and its draft. */
const mediaIn = (messages, draft) => [...messages.flatMap(({ content }) => idsIn(content)), ...draft?.media ?? []];

/** Deletes a conversation that `load` has read. */
export const keepNoMore = ({ id, messages, draft }) => keep((store) => {
  for (const name of ["conversations", "messages"]) store(name).delete(id);
  for (const name of ["answer", "draft"]) store("kept").delete(`${name} ${id}`);
  for (const medium of mediaIn(messages, draft)) deleteMedium(store, medium);
});

function deleteMedium(store, id) {
  store("media").delete(id);
  store("kept").delete(`name ${id}`);
}

/** Keeps a conversation again that was deleted. */
export function keepAgain(conversation) {
  mediaIn(conversation.messages, conversation.draft).forEach(keepMedium);
  keepDraft(conversation);
  keepConversation(conversation);
}

/** Reads a stored conversation into memory. */
export async function load(conversation) {
  const { id } = conversation;
  const draft = conversation.draft ?? await read("kept", `draft ${id}`) ?? nothing();
  const messages = conversation.messages ?? await read("messages", id) ?? [];
  await Promise.all(mediaIn(messages, draft).map(loadMedium));
  const partial = conversation.messages ? null : await read("kept", `answer ${id}`);
  if (partial && messages.at(-1)?.role === "user") messages.push(partial);
  Object.assign(conversation, { draft, messages });
}

async function loadMedium(id) {
  if (isMedium(id)) return;
  const [kept, name] = await Promise.all([read("media", id), read("kept", `name ${id}`)]);
  addMedium(kept?.type ?? "image/png", kept?.file ?? new Blob(), id);
  if (name) remember(id, name);
}

/** Deletes media that no message and no draft has, such as of questions that were edited. */
export async function sweepMedia() {
  const all = async (name) => inStores("readonly", (store) => store(name).getAll());
  const [messages, kept] = [await all("messages"), await all("kept")];
  const used = new Set([...messages.flatMap((one) => mediaIn(one)), ...kept.flatMap(({ media }) => media ?? [])]);
  const ids = await inStores("readonly", (store) => store("media").getAllKeys());
  for (const id of ids.filter((one) => !used.has(one))) {
    const { added } = await read("media", id) ?? {};
    if (added < Date.now() - LEAST_AGE_MS) keep((store) => deleteMedium(store, id));
  }
}

const keptConversation = (summary) =>
  ({ ...newConversation(summary.id), ...summary, isKept: true, messages: null, draft: null });

/** Takes over changes of the list by other tabs. */
export async function readList() {
  const kept = await inStores("readonly", (store) => store("conversations").getAll());
  const summaries = new Map(kept.map((one) => [one.id, one]));
  const isThere = (one) => !one.isKept || one.asking || isShown(one) || summaries.has(one.id);
  state.conversations = state.conversations.filter(isThere);
  for (const one of state.conversations) {
    Object.assign(one, one.isKept ? summaries.get(one.id) : {});
    summaries.delete(one.id);
  }
  state.conversations.push(...[...summaries.values()].map(keptConversation));
}
