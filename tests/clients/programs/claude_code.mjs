// Claude Code, as a program that prints one answer. Its tools read files and run commands in a folder of their own.
import { execFileSync } from "node:child_process";
import { copyFileSync, mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { fileURLToPath } from "node:url";
import { join } from "node:path";
import {
  ABOUT_PICTURE,
  AFTER_THOUGHT,
  KEY,
  MODEL,
  PICTURE,
  PLAIN,
  QUESTION,
  SCHEMA,
  SHOWN,
  THINK,
  THOUGHT,
  TOLD,
  URL,
  isEqual,
  pictureFile,
  report,
} from "./features.mjs";

const claude = fileURLToPath(new globalThis.URL("node_modules/.bin/claude", import.meta.url));
const folder = mkdtempSync(join(tmpdir(), "claude"));
copyFileSync(pictureFile, join(folder, "one.png"));
const environment = {
  PATH: process.env.PATH,
  HOME: folder,
  ANTHROPIC_BASE_URL: URL,
  ANTHROPIC_AUTH_TOKEN: KEY,
  ANTHROPIC_MODEL: MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};

// Returns the events of one question. `tools`: those that the model may call without being asked.
function ask(input, { tools = "", options = [] } = {}) {
  const form = ["-p", "--verbose", "--output-format", "stream-json", "--include-partial-messages"];
  const chosen = ["--tools", tools, "--allowedTools", tools];
  const ran = execFileSync(claude, [...form, ...chosen, ...options], { input, cwd: folder, env: environment });
  return ran.toString().trim().split("\n").map(JSON.parse);
}

const result = (events) => events.at(-1).result;
const deltas = (events, kind) =>
  events.flatMap(({ event }) => event?.delta?.[kind] ?? []).join("");

await report({
  chat: () => isEqual(result(ask(QUESTION)), PLAIN),
  stream: () => isEqual(deltas(ask(QUESTION), "text"), PLAIN),
  picture() {
    const source = { type: "base64", media_type: "image/png", data: PICTURE.toString("base64") };
    const content = [{ type: "text", text: QUESTION }, { type: "image", source }];
    const line = JSON.stringify({ type: "user", message: { role: "user", content } });
    isEqual(result(ask(`${line}\n`, { options: ["--input-format", "stream-json"] })), ABOUT_PICTURE);
  },
  structured() {
    const events = ask(QUESTION, { options: ["--json-schema", JSON.stringify(SCHEMA)] });
    isEqual(JSON.stringify(events.at(-1).structured_output), '{"colour":"red"}');
  },
  tools_streamed() {
    const events = ask(QUESTION, { tools: "Bash" });
    isEqual(deltas(events, "partial_json").replaceAll(" ", ""), '{"command":"echored"}');
    isEqual(result(events), TOLD);
  },
  tool_picture: () => isEqual(result(ask(QUESTION, { tools: "Read" })), SHOWN),
  thinking() {
    const events = ask(THINK);
    isEqual(deltas(events, "thinking").trim(), THOUGHT);
    isEqual(result(events).trim(), AFTER_THOUGHT);
  },
});
