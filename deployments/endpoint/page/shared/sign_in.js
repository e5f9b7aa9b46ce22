// Signing in: a form for the API key. The server keeps the key in a cookie that no script can read.

import { element } from "./elements.js";
import { preference } from "./preferences.js";

const SIGNED_IN = "signed-in";
let dialog = null;

export const isSignedIn = () => ["yes", "admin"].includes(preference(SIGNED_IN));

/** Whether the operator's page is for this reader. */
export const isAdmin = () => preference(SIGNED_IN) !== "yes";

/** Shows the form, unless it is there. `reason`: why it appears. Calls `onSignedIn` once the server has a key. */
export function askForKey(reason, onSignedIn) {
  if (dialog) return;
  const field = element("input", { id: "api-key", type: "password", required: true, autocomplete: "current-password",
    placeholder: "rl-…", ariaInvalid: "false" });
  const label = element("label", { htmlFor: field.id }, "API key");
  const told = element("p", { role: "status" }, reason);
  const button = element("button.button", { type: "submit" }, "Sign in");
  const form = element("form", element("h2", "Sign in"), told, label, field, button);
  dialog = element("dialog", { id: "sign-in", ariaLabel: "Sign in" }, form);
  dialog.onclose = () => { dialog.remove(); dialog = null; };
  form.onsubmit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    const problem = await signIn(field.value.trim());
    button.disabled = false;
    field.ariaInvalid = String(problem !== null);
    if (problem !== null) {
      told.textContent = problem;
      field.select();
      return;
    }
    dialog.close();
    onSignedIn();
  };
  document.body.append(dialog);
  dialog.showModal();
}

/** Returns null, or why the server does not take the key. */
async function signIn(key) {
  if (/[^\x21-\x7e]/.test(key)) return "An API key has letters, digits and signs of ASCII only.";
  try {
    const response = await fetch("/sign-in", { method: "POST", headers: { authorization: `Bearer ${key}` } });
    if (response.ok) {
      preference(SIGNED_IN, (await response.json()).admin ? "admin" : "yes");
      return null;
    }
    const error = await response.json().then((body) => body.error, () => null);
    return response.status === 401 ? "The server does not know this key." : error?.message ?? response.statusText;
  } catch {
    return "The server cannot be reached.";
  }
}

/** Forgets the key here, and shows the page anew. */
export async function signOut() {
  preference(SIGNED_IN, "no");
  await fetch("/sign-out", { method: "POST" }).catch(() => {});
  location.reload();
}
