// Media on the server: each is uploaded once, and requests name it.

import { dataUrlOf, fileIdOf, fileOf, typeOf, uploadUrl } from "./media.js";
import { keep } from "./storage.js";

const names = new Map(); // by medium: the URL by which requests name it, or a promise of it

export const remember = (id, name) => names.set(id, name);

/** The URL by which a request names a medium. Uploads it, unless the server has it; `onProgress(share)` hears of the
 *  way. Throws an Error with the server's reason if it refuses the file. If anything else fails, it is the data: URL. */
export async function upload(id, onProgress = () => {}) {
  if (!names.has(id)) names.set(id, send(id, onProgress));
  try {
    const name = await names.get(id);
    if (!name) names.delete(id);
    return name ?? await dataUrlOf(id);
  } catch (error) {
    names.delete(id);
    throw error;
  }
}

/** For media that the server has lost or deleted. */
export const forget = (ids) => ids.forEach((id) => names.delete(id));

/** Deletes what the server has of a medium. */
export async function discard(id) {
  const name = await Promise.resolve(names.get(id)).catch(() => null);
  names.delete(id);
  if (name) fetch(`/v1/files/${fileIdOf(name)}`, { method: "DELETE", keepalive: true }).catch(() => {});
}

function send(id, onProgress) {
  const form = new FormData();
  form.append("purpose", "vision");
  form.append("file", fileOf(id), typeOf(id).replace("/", "."));
  const request = new XMLHttpRequest(); // fetch tells nothing of the progress of an upload
  request.open("POST", "/v1/files");
  request.responseType = "json";
  request.upload.onprogress = ({ loaded, total }) => onProgress(loaded / total);
  return new Promise((resolve, reject) => {
    request.onload = () => {
      const { status, response } = request;
      if ([400, 413].includes(status) && response?.error?.param === "file") {
        reject(new Error(response.error.message.replace(/^file: /, "")));
        return;
      }
      const name = status < 300 && response?.id ? uploadUrl(response.id) : null;
      if (name) keep((store) => { store("kept").put(name, `name ${id}`); });
      resolve(name);
    };
    request.onerror = request.onabort = () => resolve(null);
    request.send(form);
  });
}
