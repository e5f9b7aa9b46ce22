// Copying to the clipboard.

import { element, icon, iconButton } from "../shared/elements.js";
import { notify, say } from "./notices.js";
import { seconds } from "./time.js";

export const copyButton = (label, text) =>
  iconButton("copy", label, ({ currentTarget }) => copy(text, currentTarget), "tool small copy");

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page that came over plain HTTP from another machine has no navigator.clipboard
    if (!copySelected(text)) {
      notify("This browser does not let the page copy. Select the text instead.");
      return;
    }
    button.focus();
  }
  say("Copied");
  button.classList.add("done");
  button.replaceChildren(icon("done"));
  await seconds(2);
  button.classList.remove("done");
  button.replaceChildren(icon("copy"));
}

function copySelected(text) {
  const field = element("textarea.hidden", { value: text, readOnly: true, ariaHidden: "true" });
  field.style.whiteSpace = "pre"; // the class has "nowrap", which would copy all lines as one
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}
