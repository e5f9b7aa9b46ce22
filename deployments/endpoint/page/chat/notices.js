// What the page tells its reader: notices above the composer, and texts for screen readers.

import { $, element, iconButton } from "../shared/elements.js";
import { focusQuestion } from "./composer.js";

/** Shows a notice above the composer until the reader closes it. The next question also removes an "error". */
export function notify(text, kind = "error") {
  const close = iconButton("close", "Close", () => { notice.remove(); focusQuestion(); });
  const notice = element("div", { className: `notice ${kind}` }, element("span", text), close);
  $("notices").append(notice);
}

export const removeErrors = () => $("notices").querySelectorAll(".error").forEach((notice) => notice.remove());

/** Speaks to screen readers. */
export const say = (text) => $("announcer").append(element("p", text));

/** Reads an answer out by sentences: at each word, a screen reader would start over. */
export function announcer() {
  let end = 0;
  $("announcer").replaceChildren();
  return (text, isWhole = false) => {
    const upTo = isWhole ? text.length : 1 + Math.max(text.lastIndexOf("\n"), text.lastIndexOf(". "), end - 1);
    if (upTo > end) say(text.slice(end, upTo));
    end = upTo;
  };
}
