// The panel that lists the conversations.

import { $, element, iconButton, makeButton, openDialog } from "../shared/elements.js";
import { preference } from "../shared/preferences.js";
import { focusQuestion } from "./composer.js";
import { show } from "./conversations.js";
import { isShown, state } from "./state.js";
import { keepAgain, keepNoMore, keepTitle, load, readList } from "./storage.js";

const wide = matchMedia("(min-width: 82rem)");

/** Opens the list: over the page, or beside it where there is room. There, it stays until the reader closes it. */
export async function openList() {
  const { open } = $("conversations");
  if (open) return closeList();
  await readList().catch(() => {}); // where that fails, the list shows what is in memory
  drawList();
  if (!wide.matches) return openDialog($("conversations"), $("list"));
  preference("list", "open");
  $("conversations").show();
  focusQuestion();
}

function closeList() {
  preference("list", "closed");
  $("conversations").close();
}

/** Opens the list if the reader left it open beside the page. */
export function restoreList() {
  wide.onchange = () => $("conversations").close();
  $("search").oninput = drawList;
  $("list-close").onclick = closeList;
  if (wide.matches && preference("list") === "open") openList();
}

/** Draws the list beside the page anew, unless the reader renames a conversation there. Keeps the offers of Undo. */
export function redrawList() {
  const list = $("conversation-list");
  if (!$("conversations").open || $("conversations").matches(":modal") || list.querySelector("input")) return;
  const deleted = list.querySelectorAll(".deleted");
  drawList();
  list.prepend(...deleted);
  if (deleted.length) list.hidden = false;
}

function drawList() {
  const wanted = $("search").value.trim().toLowerCase();
  const isFound = ({ title, text }) => `${title}\n${text}`.toLowerCase().includes(wanted);
  const found = state.conversations.filter(isFound).toSorted((one, other) => other.changed - one.changed);
  $("conversation-list").replaceChildren(...found.map((one) => listRow(one)));
  $("conversation-list").hidden = found.length === 0;
  $("no-conversations").hidden = found.length > 0;
  $("no-conversations").textContent = wanted ? "None has these words."
    : "There are none yet. They stay in this browser.";
}

function listRow(conversation) {
  const { title, changed, asking } = conversation;
  const time = new Date(changed).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const open = makeButton("open", () => { if (!wide.matches) $("conversations").close(); show(conversation); },
    element("span", title), element("small", asking ? "Answer on its way" : time));
  if (isShown(conversation)) open.ariaCurrent = "true";
  const row = element("li", open,
    iconButton("edit", `Rename “${title}”`, () => renameIn(row, conversation)),
    iconButton("delete", `Delete “${title}”`, () => deleteIn(row, conversation)));
  return row;
}

function redraw(row, conversation) {
  const drawn = listRow(conversation);
  row.replaceWith(drawn);
  return drawn;
}

/** Makes the title a field. Enter and a click elsewhere keep the new title, Escape the old one. */
function renameIn(row, conversation) {
  const field = element("input", { value: conversation.title, maxLength: 100, ariaLabel: "Title of the conversation" });
  const end = (title) => {
    field.onblur = null;
    if (title) {
      Object.assign(conversation, { title, isNamed: true });
      keepTitle(conversation);
    }
    return redraw(row, conversation);
  };
  field.onblur = () => end(field.value.trim());
  field.onkeydown = (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault(); // the list stays open
    end(event.key === "Enter" ? field.value.trim() : "").querySelector(".tool").focus();
  };
  row.replaceChildren(field);
  field.select();
}

/** Deletes a conversation. Until the list closes, its row offers Undo. */
async function deleteIn(row, conversation) {
  const { title } = conversation;
  await load(conversation);
  Object.assign(conversation, { isDeleted: true, isKept: false });
  conversation.asking?.abort();
  state.conversations = state.conversations.filter((one) => one !== conversation);
  keepNoMore(conversation);
  const undo = makeButton("button", () => undeleteIn(row, conversation), "Undo",
    { ariaLabel: `Undo: “${title}” is deleted` });
  row.className = "deleted";
  row.replaceChildren(element("span", `“${title}” is deleted.`), undo);
  undo.focus();
  if (isShown(conversation)) await show(state.fresh);
}

function undeleteIn(row, conversation) {
  conversation.isDeleted = false;
  state.conversations.push(conversation);
  keepAgain(conversation);
  redraw(row, conversation).firstChild.focus();
}
