// The same as features.py for clients of Node.
import { readFileSync } from "node:fs";

export const [URL, pictureFile] = process.argv.slice(2);
export const KEY = "rl-of-the-clients";
export const MODEL = "scripted";
export const PICTURE = readFileSync(pictureFile);
export const PICTURE_URL = `data:image/png;base64,${PICTURE.toString("base64")}`;
export const PLAIN = "It is red.";
export const ABOUT_PICTURE = "A blue circle.";
export const TOLD = "It was told.";
export const SHOWN = "It was shown a picture.";
export const THOUGHT = "It may be green.";
export const AFTER_THOUGHT = "It was green.";
export const QUESTION = "What colour is it?";
export const THINK = "Think. What colour is it?";

const oneOf = (name, values) => ({
  type: "object",
  properties: { [name]: { type: "string", enum: values } },
  required: [name],
  additionalProperties: false,
});
export const SCHEMA = oneOf("colour", ["red"]);
export const LOOK = oneOf("where", ["left", "right"]);

export function isEqual(found, wanted) {
  if (found !== wanted) throw new Error(`${JSON.stringify(found)}, not ${JSON.stringify(wanted)}`);
}

export async function report(features) {
  const told = {};
  for (const [name, feature] of Object.entries(features)) {
    try {
      await feature();
      told[name] = "ok";
    } catch (error) {
      told[name] = `${error.name}: ${error.message}`.slice(0, 400);
    }
  }
  console.log(JSON.stringify(told));
}
