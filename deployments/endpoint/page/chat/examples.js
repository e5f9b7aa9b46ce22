// Examples, for readers who have no picture at hand.

import { $, element, makeButton } from "../shared/elements.js";
import { drawComposer, focusQuestion } from "./composer.js";
import { addDataUrl } from "./media.js";
import { composed, state } from "./state.js";
import { keepDraft, keepMedium } from "./storage.js";

let proposed = { question: "", media: [] };

export async function loadExamples() {
  const response = await fetch("/examples").catch(() => null);
  if (response?.ok) $("examples").replaceChildren(...(await response.json()).map(exampleItem));
}

function exampleItem(example) {
  const pictures = example.pictures.map((src) => element("img", { src, alt: "" }));
  return element("li", makeButton("example", () => propose(example),
    element("span.thumbs", ...pictures), element("span", example.question)));
}

/** Puts an example into the composer: replaces the example before, and keeps the reader's own pictures and text. */
function propose(example) {
  const composing = composed();
  example.media ??= example.pictures.map(addDataUrl);
  example.media.forEach(keepMedium);
  composing.media = [...composing.media.filter((medium) => !proposed.media.includes(medium)), ...example.media];
  if (["", proposed.question].includes(composing.text.trim())) composing.text = example.question;
  proposed = example;
  drawComposer();
  keepDraft(state.current);
  focusQuestion();
}
