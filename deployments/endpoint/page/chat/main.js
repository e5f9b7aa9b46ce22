// The chat page: event handlers, and the start.

import { $, openDialog } from "../shared/elements.js";
import { signOut } from "../shared/sign_in.js";
import { showAsCode } from "./as_code.js";
import { askAgain, send } from "./asking.js";
import { attach } from "./attachments.js";
import { endEditing, question } from "./composer.js";
import { openList, restoreList } from "./conversation_list.js";
import { drawEnd, scrollToEnd } from "./conversation_view.js";
import { restore, show } from "./conversations.js";
import { watchHealth } from "./health.js";
import { exportConversation, importConversation } from "./history_file.js";
import { drawModalities } from "./media_kinds.js";
import { chooseModel } from "./models.js";
import { FIELDS, keepSettings } from "./settings.js";
import { FRESH, composed, newConversation, state } from "./state.js";
import { keepDraft } from "./storage.js";

function listenToComposer() {
  let draftTimer;
  $("send").onclick = send;
  $("stop").onclick = () => state.current.asking?.abort();
  $("again").onclick = askAgain;
  $("to-end").onclick = scrollToEnd;
  $("scroll").onscroll = drawEnd;
  $("editing-cancel").onclick = endEditing;
  question.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  question.oninput = () => {
    const conversation = state.current;
    composed().text = question.value;
    clearTimeout(draftTimer);
    draftTimer = setTimeout(() => keepDraft(conversation), 400);
  };
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog:modal")) return;
    if ($("status").open) $("status").open = false;
    else if (state.current.editing) endEditing();
    else state.current.asking?.abort();
  });
  document.addEventListener("click", (event) => { if (!$("status").contains(event.target)) $("status").open = false; });
}

/** Calls `act` with the chosen files, once for each choice. */
function takeChoice(input, act) {
  input.onchange = () => {
    const files = [...input.files];
    input.value = ""; // before all else: a second event about the same choice finds it empty
    if (files.length) act(files);
  };
}

function listenToMedia() {
  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  $("attach").onclick = () => $("media-files").click();
  takeChoice($("media-files"), attach);
  $("viewer").onclose = () => $("viewed").replaceChildren(); // else a video would play on
  document.addEventListener("paste", (event) => {
    const { files } = event.clipboardData;
    if (!files.length || event.clipboardData.getData("text/plain")) return; // office programs add a picture of the text
    event.preventDefault();
    attach([...files]);
  });
  document.addEventListener("dragenter", (event) => { if (carriesFiles(event)) $("drop").showPopover(); });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").hidePopover(); });
  document.addEventListener("dragover", (event) => { if (carriesFiles(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    $("drop").hidePopover();
    if (!carriesFiles(event)) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
}

function listenToDialogs() {
  $("list").onclick = openList;
  $("model").onchange = chooseModel;
  $("sign-out").onclick = signOut;
  $("show-code").onclick = showAsCode;
  $("new").onclick = () => show(state.fresh);
  $("settings-toggle").onclick = () => openDialog($("settings"), $("settings-toggle"));
  restoreList();
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector("[data-closes]")?.addEventListener("click", () => dialog.close());
    // The target of a click beside a dialog is the dialog itself.
    dialog.onclick = ({ target }) => { if (target === dialog) dialog.close(); };
  }
  $("settings").oninput = keepSettings;
  $("reset").onclick = () => { for (const name of FIELDS) $(name).value = ""; keepSettings(); };
  $("export").onclick = () => { $("conversations").close(); exportConversation(); };
  $("import").onclick = () => { $("conversations").close(); $("history-file").click(); };
  takeChoice($("history-file"), ([file]) => importConversation(file));
}

if (!CSS.supports("field-sizing", "content")) question.rows = 3;
state.fresh = state.current = newConversation(FRESH);
drawModalities();
restore().then(() => {
  listenToComposer();
  listenToMedia();
  listenToDialogs();
  watchHealth();
});
