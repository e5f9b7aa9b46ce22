// The conversation as a program that asks the same.

import { $, element, openDialog } from "../shared/elements.js";
import { codeBlock } from "./code_block.js";
import { typeOf } from "./media.js";
import { mediaOf } from "./messages.js";
import { requestBody } from "./server.js";
import { state, toldMessages } from "./state.js";

const OPENAI_FIELDS = ["model", "messages", "temperature", "top_p", "max_tokens", "seed", "stop"];
const PROGRAMS = { curl: ["bash", curl], Python: ["python", python], JavaScript: ["javascript", javascript] };

export function showAsCode() {
  const ids = toldMessages(state.current).flatMap(({ content }) => mediaOf(content));
  const files = new Map(ids.map((id, i) => [id, `medium-${i + 1}.${typeOf(id).split("/")[1]}`]));
  // A file's content takes the place of its mark.
  const body = requestBody(state.current, new Map(ids.map((id) => [id, `@@${typeOf(id)}@${files.get(id)}@@`])));
  body.messages.splice(body.messages.findLastIndex(({ role }) => role === "user") + 1); // what it answers
  const show = (name) => {
    const [language, write] = PROGRAMS[name];
    $("code").replaceChildren(codeBlock(write(body), language, false));
    for (const tab of $("languages").children) tab.ariaPressed = String(tab.textContent === name);
  };
  $("languages").replaceChildren(...Object.keys(PROGRAMS).map((name) =>
    element("button.button", { type: "button", onclick: () => show(name) }, name)));
  $("code-files").textContent = files.size ? `It reads ${[...files.values()].join(", ")} from its folder.` : "";
  show("curl");
  $("settings").close();
  openDialog($("as-code"), $("settings-toggle"));
}

const MARK = /@@([^@]+)@([^@]+)@@/g;
const QUOTED_MARK = /"@@([^@]+)@([^@]+)@@"/g;

function curl(body) {
  const escaped = JSON.stringify(body, null, 2).replace(/[\\$`]/g, "\\$&");
  const json = escaped.replace(MARK, "data:$1;base64,$$(base64 < $2 | tr -d '\\n')");
  return `curl ${location.origin}/v1/chat/completions \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer $RAYLENS_API_KEY" \\
  -d @- <<JSON
${json}
JSON`;
}

const READS = `

def data_url(kind, name):
    with open(name, "rb") as file:
        return f"data:{kind};base64,{base64.b64encode(file.read()).decode()}"

`;

function python(body) {
  const fields = Object.entries(body).filter(([name]) => OPENAI_FIELDS.includes(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI_FIELDS.includes(name)));
  if (Object.keys(others).length) fields.push(["extra_body", others]);
  const told = fields.map(([name, value]) => `    ${name}=${literal(value)},`).join("\n")
    .replace(QUOTED_MARK, 'data_url("$1", "$2")');
  const reads = told.includes("data_url(");
  return `${reads ? "import base64\n" : ""}import os

from openai import OpenAI
${reads ? READS : ""}
client = OpenAI(base_url="${location.origin}/v1", api_key=os.environ.get("RAYLENS_API_KEY", "none"))
answer = client.chat.completions.create(
${told}
)
print(answer.choices[0].message.content)`;
}

/** A value of JSON in Python. */
function literal(value) {
  const words = { true: "True", false: "False", null: "None" };
  return JSON.stringify(value, null, 4)
    .replace(/"(?:[^"\\]|\\.)*"|\b(?:true|false|null)\b/g, (part) => words[part] ?? part)
    .replaceAll("\n", "\n    ");
}

function javascript(body) {
  const json = JSON.stringify(body, null, 2).replace(QUOTED_MARK, 'dataUrl("$1", "$2")');
  const reads = json.includes("dataUrl(") ? `import { readFileSync } from "node:fs";

const dataUrl = (kind, name) => \`data:\${kind};base64,\${readFileSync(name, "base64")}\`;

` : "";
  return `${reads}const response = await fetch("${location.origin}/v1/chat/completions", {
  method: "POST",
  headers: {
    "Content-Type": "application/json",
    Authorization: \`Bearer \${process.env.RAYLENS_API_KEY}\`,
  },
  body: JSON.stringify(${json.replaceAll("\n", "\n  ")}),
});
const answer = await response.json();
console.log(answer.choices[0].message.content);`;
}
