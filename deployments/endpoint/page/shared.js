// ---- What both pages do: elements, what this browser keeps, light and dark.

const $ = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

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
