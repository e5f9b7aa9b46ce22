// The pictures and videos of the next question.

import { $, element, iconButton } from "../shared/elements.js";
import { focusQuestion, question } from "./composer.js";
import { addMedium } from "./media.js";
import { takenType } from "./media_kinds.js";
import { mediumButton, nameOf } from "./media_view.js";
import { loadModels, modalities } from "./models.js";
import { notify } from "./notices.js";
import { composed, isShown, state } from "./state.js";
import { keepDraft, keepMedium } from "./storage.js";
import { discard, upload } from "./uploads.js";

export async function attach(files) {
  const conversation = state.current;
  const adding = addMedia(conversation, files, conversation.adding);
  conversation.adding = adding;
  await adding;
  if (conversation.adding === adding) conversation.adding = null;
  keepDraft(conversation);
  if (isShown(conversation)) drawAttached();
  focusQuestion();
}

/** Adds files to the composer, after the `earlier` ones. Returns whether all could be added. */
async function addMedia(conversation, files, earlier) {
  let areAllAdded = await earlier ?? true;
  if (!modalities()) await loadModels().catch(() => {}); // without it the server decides later
  for (const file of files) {
    try {
      await addFile(conversation, file);
    } catch (error) {
      notify(`“${file.name}” cannot be added: ${error.message}.`);
      areAllAdded = false;
    }
  }
  return areAllAdded;
}

/** Adds a file and uploads it. Throws an Error if the model or the server does not take it. */
async function addFile(conversation, file) {
  const medium = addMedium(await takenType(file), file);
  const { media } = composed(conversation);
  media.push(medium);
  keepMedium(medium);
  if (isShown(conversation)) drawAttached();
  try {
    await upload(medium, (share) => drawProgress(medium, share));
  } catch (error) {
    media.splice(media.indexOf(medium), 1);
    throw error;
  }
}

/** How much of a medium the server has. */
function drawProgress(medium, share) {
  const bar = $("attached").children[composed().media.indexOf(medium)]?.querySelector("progress");
  if (bar) Object.assign(bar, { value: share, hidden: share === 1 });
}

export function drawAttached() {
  const { media } = composed();
  $("attached").replaceChildren(...media.map((medium, i) => {
    const remove = iconButton("close", `Remove ${nameOf(medium, i)}`, () => {
      media.splice(i, 1);
      if (!state.current.editing) discard(medium); // else the earlier question still has it
      drawAttached();
      keepDraft(state.current);
      ($("attached").querySelectorAll(".remove")[Math.min(i, media.length - 1)] ?? question).focus();
    }, "remove");
    const bar = element("progress", { max: 1, hidden: true, ariaLabel: `Upload of ${nameOf(medium, i)}` });
    return element("li", mediumButton(medium, i), bar, remove);
  }));
}
