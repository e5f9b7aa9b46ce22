// Settings: empty ones are not sent; a wrong one holds questions back.

import { $, openDialog } from "../shared/elements.js";
import { preference } from "../shared/preferences.js";
import { model } from "./models.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const RANGED = [...NUMBERS, "stop_strings"];
export const FIELDS = [...RANGED, "system"];
const RANGES = Object.fromEntries(RANGED.map((name) => [name, $(`${name}-range`).textContent]));

const stopStrings = () =>
  $("stop_strings").value.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n"));

export function samplingSettings() {
  const settings = {};
  for (const name of NUMBERS) if ($(name).value !== "") settings[name] = $(name).valueAsNumber;
  const stop = stopStrings();
  if (stop.length) settings.stop = stop;
  return settings;
}

/** Checks a setting by the server's limits. A step of 1 requires whole numbers; others serve the arrow keys only. */
function isInRange(name) {
  if (name === "stop_strings") return stopStrings().length <= 16 && stopStrings().every((text) => text.length <= 256);
  const { value, valueAsNumber: number, min, max, step, dataset, validity } = $(name);
  if (value === "") return !validity.badInput;
  return (min === "" || number >= Number(min)) && (max === "" || number <= Number(max))
    && (step !== "1" || Number.isInteger(number)) && (dataset.above === undefined || number > Number(dataset.above));
}

/** Marks settings out of range, with the reason beneath. */
function markWrongSettings() {
  for (const name of RANGED) {
    const isWrong = !isInRange(name);
    $(name).ariaInvalid = String(isWrong);
    $(`${name}-range`).textContent = isWrong ? `Not sent. Allowed: ${RANGES[name]}` : RANGES[name];
  }
}

/** Opens the settings at the first one out of range, if any. */
export function settingsAreValid() {
  const wrong = RANGED.find((name) => !isInRange(name));
  if (!wrong) return true;
  openDialog($("settings"), $("settings-toggle"));
  $(wrong).focus();
  return false;
}

/** Each model has settings of its own. */
const keptAs = () => `settings ${model()?.id}`;

export function restoreSettings() {
  const kept = JSON.parse(preference(keptAs()) ?? "{}");
  for (const name of FIELDS) $(name).value = kept[name] ?? "";
  markWrongSettings();
}

export function keepSettings() {
  preference(keptAs(), JSON.stringify(Object.fromEntries(FIELDS.map((name) => [name, $(name).value]))));
  markWrongSettings();
}
