// What this browser keeps of a reader's choices, in localStorage.

export function preference(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(`raylens.${name}`, value);
    return localStorage.getItem(`raylens.${name}`);
  } catch {
    return null; // this browser keeps nothing
  }
}
