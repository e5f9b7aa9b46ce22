// Maths in answers, by KaTeX, which the page loads with the first formula.

import { element } from "../shared/elements.js";

const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 50, maxExpand: 1000 };
let loading = null;

/** A formula. Its source stands there until KaTeX has come, and for good where KaTeX does not understand it. */
export function maths(source, isBlock) {
  const node = element(isBlock ? "div" : "span", { className: isBlock ? "maths block" : "maths" }, source.trim());
  if (isBlock) node.tabIndex = 0; // it scrolls
  if (globalThis.katex) draw(node, source, isBlock);
  else loadOnce().then(() => draw(node, source, isBlock));
  return node;
}

function draw(node, source, displayMode) {
  const drawn = element("span");
  try {
    globalThis.katex.render(source, drawn, { ...OPTIONS, displayMode });
    node.replaceChildren(...drawn.childNodes);
  } catch {
    node.classList.add("wrong");
  }
}

function loadOnce() {
  loading ??= Promise.all([import("../vendor/katex.min.js"), loadStyle()]);
  return loading;
}

const loadStyle = () => new Promise((resolve) => {
  const href = new URL("../vendor/katex.min.css", import.meta.url).href;
  document.head.append(element("link", { rel: "stylesheet", href, onload: resolve, onerror: resolve }));
});
