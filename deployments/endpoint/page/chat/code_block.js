// Code in answers, in colours by highlight.js, which the page loads with the first code.

import { element } from "../shared/elements.js";
import { copyButton } from "./copying.js";

const MOST_COLOURED = 50_000; // characters
let highlighter = null;

/** `language`: of the fence, or "". Code that still grows has no button yet, since each word would replace it. */
export function codeBlock(source, language, isGrowing) {
  const text = source.replace(/\n$/, "");
  const code = element("code", text);
  const head = element("div.head", element("span", language || "text"),
    isGrowing ? null : copyButton("Copy the code", text));
  if (language && text.length <= MOST_COLOURED) colour(code, text, language);
  return element("div.code", head, element("pre", { tabIndex: 0 }, code));
}

function colour(code, text, language) {
  if (!highlighter) {
    import("../vendor/highlight.min.js").then((module) => {
      highlighter = module.default;
      colour(code, text, language);
    });
  } else if (highlighter.getLanguage(language)) {
    const { _emitter: emitter } = highlighter.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(...emitter.rootNode.children.map(nodeOf));
  }
}

/** A part of highlight.js' tree: a text, or {scope, children}. */
function nodeOf(part) {
  if (typeof part === "string") return document.createTextNode(part);
  const [first = "", ...others] = part.scope?.split(".") ?? [];
  const className = [first && `hljs-${first}`, ...others.map((one, i) => one + "_".repeat(i + 1))].join(" ");
  return element("span", { className }, ...part.children.map(nodeOf));
}
