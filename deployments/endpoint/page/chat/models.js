// The models that the server offers, and the one that a conversation asks.

import { $, element } from "../shared/elements.js";
import { preference } from "../shared/preferences.js";
import { isAdmin, isSignedIn } from "../shared/sign_in.js";
import { drawModalities } from "./media_kinds.js";
import { call, problemOf } from "./server.js";
import { restoreSettings } from "./settings.js";
import { state } from "./state.js";
import { keepTitle } from "./storage.js";

/** The chosen model's card: {id, modalities, ...}; null before the server has told its models. */
export function model(conversation = state.current) {
  const cards = state.models ?? [];
  const named = (id) => cards.find((card) => card.id === id);
  return named(conversation?.model) ?? named(preference("model")) ?? cards[0] ?? null;
}

/** The media that the model takes, such as ["image", "video"]; null: not known yet. */
export const modalities = () => {
  const card = model();
  return card && (card.modalities === undefined ? ["image"] : card.modalities);
};

export async function loadModels() {
  const response = await call("/v1/models");
  if (!response.ok) throw await problemOf(response);
  state.models = (await response.json()).data;
  $("sign-out").hidden = !isSignedIn();
  $("operator").hidden = !isAdmin();
  drawModel();
}

/** Shows the conversation's model, its settings and its media. */
export function drawModel() {
  const card = model();
  if (!card) return;
  const told = (one) => one.parent ? `${one.id} (adapter of ${one.parent})` : one.id;
  $("model").replaceChildren(...state.models.map((one) => element("option", { value: one.id }, told(one))));
  $("model").value = $("model").title = card.id;
  $("model").disabled = state.models.length < 2;
  document.title = `Raylens · ${card.id}`;
  restoreSettings();
  drawModalities();
}

export function chooseModel() {
  const conversation = state.current;
  conversation.model = $("model").value;
  preference("model", conversation.model);
  if (conversation !== state.fresh) keepTitle(conversation);
  drawModel();
}
