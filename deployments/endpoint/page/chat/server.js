// Requests to the server, and the reasons of missing answers.

import { $ } from "../shared/elements.js";
import { askForKey, isSignedIn } from "../shared/sign_in.js";
import { lookSoon } from "./health.js";
import { mediaOf, wireMessage } from "./messages.js";
import { loadModels, model } from "./models.js";
import { samplingSettings } from "./settings.js";
import { state, toldMessages } from "./state.js";
import { forget, upload } from "./uploads.js";

/** The reason of a missing answer: `title` and `message` for the reader, `detail` with the error's other fields. */
export class Problem extends Error {
  constructor(title, message, { detail = "", code = null, isBusy = false, isGone = false, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { title, detail, code, isBusy, isGone, retryAfter });
  }
}

export const STOPPED = new Problem("Stopped", "");
const TITLES = { 401: "You are not signed in", 413: "The question is too large", 429: "The server is busy",
  503: "The server is not ready" };

export async function problemOf(response) {
  const text = await response.text();
  let error = {};
  try { error = JSON.parse(text).error ?? {}; } catch { /* a proxy has answered, not the server */ }
  const otherTitle = response.status < 500 ? "The server refused the question" : "The server failed";
  const message = error.message ?? (text.slice(0, 1000) || response.statusText);
  return new Problem(TITLES[response.status] ?? otherTitle, message, {
    detail: [response.status, error.type, error.param, error.code].filter(Boolean).join(" · "),
    code: error.code,
    isBusy: response.status === 429 || response.status === 503,
    retryAfter: secondsOf(response.headers.get("retry-after")),
  });
}

/** Retry-After holds seconds or a date. */
function secondsOf(retryAfter) {
  if (!retryAfter) return 5;
  const count = /^\d+$/.test(retryAfter) ? Number(retryAfter) : (Date.parse(retryAfter) - Date.now()) / 1000;
  return Math.min(Math.max(Math.ceil(count) || 1, 1), 600);
}

/** Throws a Problem if nothing comes back. Where the server asks for a key, the page asks its reader. */
export async function call(path, options) {
  const response = await fetch(path, options).catch((error) => {
    throw options?.signal?.aborted ? error : gone();
  });
  if (response.status === 401) {
    const reason = isSignedIn() ? "The server does not take your API key any more." : "This server takes an API key.";
    askForKey(reason, lookSoon);
  }
  return response;
}

function gone(message = "Nothing has come back from it. The page looks for it and says when it is back.") {
  lookSoon();
  return new Problem("The server cannot be reached", message, { isGone: true });
}

/** What a request has of the conversation and of the settings. `urls`: of the media. */
export function requestBody(conversation, urls) {
  const system = $("system").value.trim();
  const messages = toldMessages(conversation).map((message) => wireMessage(message, urls));
  if (system && messages[0]?.role !== "system") messages.unshift({ role: "system", content: system });
  return { model: model(conversation)?.id, messages, ...samplingSettings() };
}

/** Uploads media that the server has not (any more), and asks. The answer goes on behind `begun`. */
export async function post(conversation, signal, begun = "", isAgain = false) {
  if (!state.models) await loadModels();
  const media = toldMessages(conversation).flatMap(({ role, content }) => role === "user" ? mediaOf(content) : []);
  const urls = new Map(await Promise.all(media.map(async (id) => [id, await upload(id)]))
    .catch((error) => { throw new Problem("The server refused a file", error.message); }));
  const body = { ...requestBody(conversation, urls), stream: true, stage_timings: true,
    stream_options: { include_usage: true } };
  if (begun) {
    body.messages.push({ role: "assistant", content: begun });
    Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
  }
  const headers = { "content-type": "application/json" };
  const response = await call("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (problem.code !== "file_not_found" || isAgain) throw problem;
  forget(media);
  return post(conversation, signal, begun, true);
}

/** The JSON objects of server-sent events up to [DONE]. Throws when they end without it. */
export async function* eventsOf(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let buffer = "";;) {
    const { value, done } = await reader.read().catch(() => ({ done: true }));
    signal.throwIfAborted();
    if (done) throw gone("The connection was lost in the middle of the answer.");
    const events = (buffer + value).split(/\r?\n\r?\n/);
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
