// ---- What both pages do: elements, what this browser keeps, light and dark.

const $ = (id) => document.getElementById(id);

/** A new element. `name`: a tag, or tag.class. `others`: objects with properties, and children; null is no child. */
function element(name, ...others) {
  const [tag, className] = name.split(".");
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const one of others.filter((other) => other !== null)) {
    if (one.constructor === Object) Object.assign(node, one);
    else node.append(one);
  }
  return node;
}

/** A copy of the first element of a template. */
const copyOf = (template) => $(template).content.firstElementChild.cloneNode(true);

function preference(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(`raylens.${name}`, value);
    return localStorage.getItem(`raylens.${name}`);
  } catch {
    return null; // this browser keeps nothing
  }
}

const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark"
  || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  $("theme").ariaPressed = String(isDark());
}

$("theme").onclick = () => {
  const theme = isDark() ? "light" : "dark";
  preference("theme", theme);
  setTheme(theme);
};
matchMedia("(prefers-color-scheme: dark)").onchange = () => setTheme();
setTheme(preference("theme"));
