// How the page shows pictures and videos.

import { $, element, icon, makeButton, openDialog } from "../shared/elements.js";
import { isDocument, isVideo, urlOf } from "./media.js";

export const nameOf = (id, i) => `${isDocument(id) ? "PDF" : isVideo(id) ? "video" : "picture"} ${i + 1}`;

/** A picture, or a video with these properties. */
function drawMedium(id, i, ofVideo) {
  const src = urlOf(id);
  return isVideo(id) ? element("video", { src, playsInline: true, ...ofVideo })
    : element("img", { src, alt: `Picture ${i + 1}` });
}

/** A small view of a medium. */
export function mediumButton(id, i) {
  const button = isDocument(id) ? documentButton(id, i) : pictureButton(id, i);
  button.dataset.medium = id;
  return button;
}

/** A click opens the large picture or video. */
function pictureButton(id, i) {
  const ariaLabel = `${isVideo(id) ? "Play" : "Enlarge"} ${nameOf(id, i)}`;
  const enlarge = ({ currentTarget }) => {
    $("viewed").replaceChildren(drawMedium(id, i, { controls: true, autoplay: true, loop: true }));
    openDialog($("viewer"), currentTarget);
  };
  const small = drawMedium(id, i, { muted: true, preload: "metadata", tabIndex: -1 });
  small.draggable = false;
  return makeButton("medium", enlarge, { ariaLabel }, small, isVideo(id) ? element("span.play", icon("play")) : null);
}

/** A click opens the PDF in a tab of its own. */
const documentButton = (id, i) => makeButton("medium document", () => open(urlOf(id), "_blank", "noopener"),
  { ariaLabel: `Open ${nameOf(id, i)}` }, icon("document"), element("span", "PDF"));
