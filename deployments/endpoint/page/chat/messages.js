// Messages: texts that hold media as <img src="medium:ID">, <video src="medium:ID"></video> and
// <embed src="medium:ID">.

import { fileIdOf, isDocument, isMedium, isVideo } from "./media.js";

const shortened = (text, length) => text.length > length ? `${text.slice(0, length - 1)}…` : text;

const MOST_SEARCHED = 20_000; // characters of a conversation
const TAG = /<(?:img|video|embed) src="medium:([a-z0-9]+)">(?:<\/video>)?/g;
const tagged = (id) => isVideo(id) ? `<video src="medium:${id}"></video>`
  : `<${isDocument(id) ? "embed" : "img"} src="medium:${id}">`;

/** [{text}, {medium}, ...]; the line break between a text and a medium belongs to neither. */
export function partsOf(content) {
  const parts = [];
  let done = 0;
  for (const { 0: tag, 1: medium, index } of content.matchAll(TAG)) {
    if (!isMedium(medium)) continue;
    parts.push({ text: content.slice(done, index) }, { medium });
    done = index + tag.length;
  }
  parts.push({ text: content.slice(done) });
  parts.forEach((part, i) => {
    if (i > 0) part.text = part.text?.replace(/^\n/, "");
    if (i < parts.length - 1) part.text = part.text?.replace(/\n$/, "");
  });
  return parts.filter(({ medium, text }) => medium || text);
}

/** The ids of media in a text that the browser has kept. */
export const idsIn = (content) => [...content.matchAll(TAG)].map(({ 1: id }) => id);

export const mediaOf = (content) => partsOf(content).flatMap(({ medium }) => medium ?? []);
export const textOf = (content) => partsOf(content).flatMap(({ text }) => text ?? []).join("\n");
export const contentOf = (text, media) => [...media.map(tagged), text].filter(Boolean).join("\n");

/** A message in the server's format: content parts for a user's message with media. `urls`: of the media. */
export function wireMessage({ role, content }, urls) {
  const parts = role === "user" ? partsOf(content) : [];
  const wirePart = ({ medium, text }) => {
    if (!medium) return { type: "text", text };
    if (isDocument(medium)) return { type: "file", file: documentFile(urls.get(medium)) };
    const type = isVideo(medium) ? "video_url" : "image_url";
    return { type, [type]: { url: urls.get(medium) } };
  };
  return { role, content: parts.some(({ medium }) => medium) ? parts.map(wirePart) : content };
}

/** What the search in the list of conversations looks through. */
export const searchTextOf = (messages) =>
  messages.map(({ content }) => content.replaceAll(TAG, "")).join("\n").slice(0, MOST_SEARCHED);

const documentFile = (url) => fileIdOf(url) ? { file_id: fileIdOf(url) } : { file_data: url };

export function titleOf(messages) {
  const first = messages.find(({ role }) => role === "user");
  if (!first) return "New conversation";
  const [line] = textOf(first.content).trim().split("\n", 1);
  return shortened(line, 60) || (mediaOf(first.content).every(isVideo) ? "Video"
    : mediaOf(first.content).every(isDocument) ? "PDF" : "Pictures");
}
