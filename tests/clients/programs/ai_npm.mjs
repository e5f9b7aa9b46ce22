import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { ABOUT_PICTURE, AFTER_THOUGHT, KEY, LOOK, MODEL, PICTURE, PLAIN, QUESTION, SCHEMA, SHOWN, THINK, THOUGHT, TOLD, URL, isEqual, report } from "./features.mjs";

const options = { name: "raylens", baseURL: `${URL}/v1`, apiKey: KEY };
const model = createOpenAICompatible({ ...options, supportsStructuredOutputs: true })(MODEL);
const byResponses = createOpenAI(options).responses(MODEL);
const stopWhen = stepCountIs(2);

function look(result, toModelOutput) {
  const execute = async ({ where }) => {
    isEqual(where, "left");
    return result;
  };
  return { look: tool({ description: "Look there.", inputSchema: jsonSchema(LOOK), execute, toModelOutput }) };
}

await report({
  chat: async () => {
    for (const one of [model, byResponses]) isEqual((await generateText({ model: one, prompt: QUESTION })).text, PLAIN);
  },
  stream: async () => {
    for (const one of [model, byResponses]) isEqual(await streamText({ model: one, prompt: QUESTION }).text, PLAIN);
  },
  picture: async () => {
    const content = [{ type: "text", text: QUESTION }, { type: "image", image: PICTURE }];
    isEqual((await generateText({ model, messages: [{ role: "user", content }] })).text, ABOUT_PICTURE);
  },
  structured: async () => {
    const output = Output.object({ schema: jsonSchema(SCHEMA) });
    isEqual((await generateText({ model, prompt: QUESTION, output })).output.colour, "red");
  },
  tools_streamed: async () => {
    for (const one of [model, byResponses])
      isEqual(await streamText({ model: one, prompt: QUESTION, tools: look("red"), stopWhen }).text, TOLD);
  },
  tool_picture: async () => {
    const data = PICTURE.toString("base64");
    const shown = () => ({ type: "content", value: [{ type: "image-data", data, mediaType: "image/png" }] });
    isEqual((await generateText({ model: byResponses, prompt: QUESTION, tools: look("red", shown), stopWhen })).text, SHOWN);
  },
  thinking: async () => {
    const answer = await generateText({ model, prompt: THINK });
    isEqual(answer.reasoningText.trim(), THOUGHT);
    isEqual(answer.text.trim(), AFTER_THOUGHT);
  },
});
