// The pictures and videos of conversations. Messages and drafts hold their ids.

const media = new Map(); // by id: {type, file, url}; `url`: for elements of the page

export const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("");

/** Adds a file of that MIME type, or one that the browser has kept under an id. Returns the id. */
export function addMedium(type, file, id = newId()) {
  if (!media.has(id)) media.set(id, { type, file, url: URL.createObjectURL(file) });
  return id;
}

const UPLOAD = "upload:";

/** The URL by which a request names a file that was uploaded. */
export const uploadUrl = (fileId) => UPLOAD + fileId;

/** The id of the file that such a URL names; null for other URLs. */
export const fileIdOf = (url) => url.startsWith(UPLOAD) ? url.slice(UPLOAD.length) : null;

export const isMedium = (id) => media.has(id);
export const isVideo = (id) => media.get(id).type.startsWith("video/");
export const isDocument = (id) => media.get(id).type === "application/pdf";
export const fileOf = (id) => media.get(id).file;
export const typeOf = (id) => media.get(id).type;
export const urlOf = (id) => media.get(id).url;

export function dataUrlOf(id) {
  const { type, file } = media.get(id);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(`data:${type};base64,${reader.result.slice(reader.result.indexOf(",") + 1)}`);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Adds the content of a data: URL in base64. Returns the id. */
export function addDataUrl(url) {
  const type = url.slice("data:".length, url.indexOf(";"));
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (character) => character.charCodeAt(0));
  return addMedium(type, new Blob([bytes], { type }));
}
