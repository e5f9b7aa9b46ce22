// The kinds of media that the model takes.

import { $ } from "../shared/elements.js";
import { modalities } from "./models.js";

const KINDS = [
  { modality: "image", noun: "picture", types: ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"],
    names: "a PNG, JPEG, WebP, GIF or BMP picture" },
  { modality: "image", noun: "PDF", types: ["application/pdf"], names: "a PDF" }, // its pages are pictures
  { modality: "video", noun: "video", types: ["video/mp4", "video/quicktime", "video/webm"],
    names: "an MP4, MOV or WebM video" },
];
const takenKinds = () => KINDS.filter(({ modality }) => (modalities() ?? ["image"]).includes(modality));
const takenNouns = () =>
  takenKinds().map(({ noun }) => `${noun}s`).join(", ").replace(/, ([^,]*)$/, " and $1") || "text";

const SIGNATURES = [
  ["image/png", /^\x89PNG\r\n\x1a\n/],
  ["image/jpeg", /^\xff\xd8\xff/],
  ["image/gif", /^GIF8[79]a/],
  ["image/webp", /^RIFF[^]{4}WEBP/],
  ["image/bmp", /^BM[^]{4}\0{4}/],
  ["application/pdf", /^%PDF-/],
  ["video/quicktime", /^[^]{4}ftypqt {2}/],
  ["video/mp4", /^[^]{4}ftyp(?!hei|hev|mif|msf|avi)/], // pictures as HEIC and AVIF begin like that, too
  ["video/webm", /^\x1aE\xdf\xa3/],
];

/** The MIME type of a file, by its first bytes. Throws an Error if the model does not take it. */
export async function takenType(file) {
  const head = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
  const type = SIGNATURES.find(([, signature]) => signature.test(head))?.[0];
  if (!type) throw new Error(`it is not ${takenKinds().map(({ names }) => names).join(", nor ")}`);
  const isTaken = takenKinds().some(({ types }) => types.includes(type));
  if (modalities() && !isTaken) { // where the page does not know, the server decides
    const { noun } = KINDS.find(({ types }) => types.includes(type));
    throw new Error(`it is a ${noun}, and the model here takes only ${takenNouns()}`);
  }
  return type;
}

/** Names the model's media wherever the page offers to add some. */
export function drawModalities() {
  const taken = takenKinds();
  $("attach").ariaLabel = $("attach").title = `Add ${takenNouns()}`;
  $("drop-text").textContent = `Drop ${takenNouns()} to ask about them`;
  $("welcome-media").textContent = `Drop ${takenNouns()} anywhere, paste them, or choose them below.`;
  $("media-files").accept = taken.flatMap(({ types }) => types).join();
  $("examples").hidden = !taken.some(({ modality }) => modality === "image");
}
