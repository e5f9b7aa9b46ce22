// Export and import of conversations as files.

import { element } from "../shared/elements.js";
import { FROM } from "./conversation_view.js";
import { show } from "./conversations.js";
import { addDataUrl, dataUrlOf, newId } from "./media.js";
import { mediaOf } from "./messages.js";
import { loadModels, model } from "./models.js";
import { notify } from "./notices.js";
import { newConversation, state, toldMessages } from "./state.js";
import { keepConversation, keepMedium } from "./storage.js";

export async function exportConversation() {
  if (!state.models) await loadModels().catch(() => {});
  const messages = await Promise.all(toldMessages(state.current).map(
    async ({ role, content }) => ({ role, content: await withDataUrls(content) })));
  const asked = model()?.id ?? null;
  const text = JSON.stringify({ version: 1, model: asked, messages }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const name = (asked ?? "conversation").replace(/[^\w.-]+/g, "-");
  const day = new Date().toISOString().slice(0, 10);
  element("a", { href: url, download: `raylens-${name}-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** The messages of an exported conversation. Throws an error that names the wrong field. */
function messagesOf(text) {
  let history;
  try { history = JSON.parse(text); } catch (error) { throw new Error(`it is no JSON (${error.message})`); }
  const check = (holds, complaint) => { if (!holds) throw new Error(complaint); };
  const told = (value) => (JSON.stringify(value) ?? "nothing").slice(0, 60);
  check(history !== null && typeof history === "object" && !Array.isArray(history), "it holds no JSON object");
  check(history.version === 1, `version is ${told(history.version)}, and only 1 is known`);
  check(Array.isArray(history.messages), `messages is ${told(history.messages)}, not a list`);
  check(history.messages.length > 0, "messages is empty");
  return history.messages.map((message, i) => {
    check(message !== null && typeof message === "object", `messages[${i}] is ${told(message)}, not an object`);
    const { role, content } = message;
    check(Object.hasOwn(FROM, role), `messages[${i}].role is ${told(role)}, not "user", "assistant" or "system"`);
    check(typeof content === "string", `messages[${i}].content is ${told(content)}, not a text`);
    return { role, content: withoutDataUrls(content) };
  });
}

// In a file, media are <img src="data:image/png;base64,...">, <video src="data:..."></video> and
// <embed src="data:...">.

/** The text with its media themselves in place of their ids. */
async function withDataUrls(content) {
  const ids = mediaOf(content);
  const urls = await Promise.all(ids.map(dataUrlOf));
  return ids.reduce((text, id, i) => text.replace(`"medium:${id}"`, () => `"${urls[i]}"`), content);
}

const MEDIA_START = /<(img|video|embed) src="/g;
const MEDIA_HEAD = {
  img: /^data:image\/(?:png|jpeg|webp|gif|bmp);base64,/,
  embed: /^data:application\/pdf;base64,/,
  video: /^data:video\/(?:mp4|quicktime|webm);base64,/,
};

/** No match spans the data: megabytes would exhaust the browser's stack. */
function isDataUrl(tag, source) {
  const head = MEDIA_HEAD[tag].exec(source.slice(0, 40));
  return head !== null && source.length > head[0].length && !/[^A-Za-z0-9+/=]/.test(source.slice(head[0].length));
}

/** The text with ids in place of its media, which the page keeps. */
export function withoutDataUrls(content) {
  let text = "";
  let done = 0;
  for (const { 0: start, 1: tag, index } of content.matchAll(MEDIA_START)) {
    const begin = index + start.length;
    const end = content.indexOf('"', begin);
    if (end < 0) break;
    const url = content.slice(begin, end);
    if (!content.startsWith(tag === "video" ? '"></video>' : '">', end) || !isDataUrl(tag, url)) continue;
    const id = addDataUrl(url);
    keepMedium(id);
    text += `${content.slice(done, begin)}medium:${id}`;
    done = end;
  }
  return text + content.slice(done);
}

/** Adds an exported conversation to the others, and shows it. */
export async function importConversation(file) {
  try {
    const conversation = newConversation(newId(), messagesOf(await file.text()));
    state.conversations.push(conversation);
    keepConversation(conversation);
    await show(conversation);
  } catch (error) {
    notify(`“${file.name}” cannot be imported: ${error.message}.`);
  }
}
