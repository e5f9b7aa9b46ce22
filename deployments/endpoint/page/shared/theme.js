// Light and dark. No module, so that it runs before the first paint.

"use strict";

{
  const root = document.documentElement;
  const isDark = () => getComputedStyle(root).colorScheme === "dark"
    || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const kept = (act) => { try { return act(localStorage); } catch { return null; } }; // this browser may keep nothing
  const theme = kept((storage) => storage.getItem("raylens.theme"));
  if (theme) root.dataset.theme = theme;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const tell = () => { button.ariaPressed = String(isDark()); };
    button.onclick = () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      kept((storage) => storage.setItem("raylens.theme", root.dataset.theme));
      tell();
    };
    matchMedia("(prefers-color-scheme: dark)").onchange = tell;
    tell();
  });
}
