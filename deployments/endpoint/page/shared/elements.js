// The page's elements. Text from outside becomes text nodes only; the page's policy forbids markup from strings.

export const $ = (id) => document.getElementById(id);

/** A new element. `name`: a tag, or tag.class. `others`: objects with properties, and children; null is no child. */
export function element(name, ...others) {
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
export const copyOf = (template) => $(template).content.firstElementChild.cloneNode(true);

export function icon(name) {
  const svg = copyOf("icon");
  svg.firstChild.setAttribute("href", `#i-${name}`);
  return svg;
}

export const makeButton = (className, onclick, ...others) =>
  element("button", { className, type: "button", onclick }, ...others);

export const iconButton = (name, label, onclick, className = "tool small") =>
  makeButton(className, onclick, icon(name), { ariaLabel: label, title: label });

/** Opens a dialog. When it closes, `opener` gets the focus back. */
export function openDialog(dialog, opener) {
  opener.focus(); // Safari does not focus a button that is clicked
  dialog.showModal();
}
