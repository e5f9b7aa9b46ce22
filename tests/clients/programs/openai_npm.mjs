import OpenAI from "openai";
import { ABOUT_PICTURE, AFTER_THOUGHT, KEY, LOOK, MODEL, PICTURE_URL, PLAIN, QUESTION, SCHEMA, SHOWN, THINK, THOUGHT, TOLD, URL, isEqual, report } from "./features.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const tool = { type: "function", function: { name: "look", parameters: LOOK } };
const said = [{ role: "user", content: QUESTION }];
const create = (fields) => client.chat.completions.create({ model: MODEL, messages: said, ...fields });

await report({
  chat: async () => isEqual((await create({})).choices[0].message.content, PLAIN),
  stream: async () => {
    let text = "";
    for await (const chunk of await create({ stream: true })) text += chunk.choices[0].delta.content ?? "";
    isEqual(text, PLAIN);
  },
  picture: async () => {
    const content = [{ type: "text", text: QUESTION }, { type: "image_url", image_url: { url: PICTURE_URL } }];
    isEqual((await create({ messages: [{ role: "user", content }] })).choices[0].message.content, ABOUT_PICTURE);
  },
  structured: async () => {
    const json_schema = { name: "colour", schema: SCHEMA, strict: true };
    const answer = await create({ response_format: { type: "json_schema", json_schema } });
    isEqual(JSON.parse(answer.choices[0].message.content).colour, "red");
  },
  tools_streamed: async () => {
    const stream = client.chat.completions.stream({ model: MODEL, messages: said, tools: [tool] });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    const [call] = message.tool_calls;
    isEqual(JSON.parse(call.function.arguments).where, "left");
    const result = { role: "tool", tool_call_id: call.id, content: "red" };
    isEqual((await create({ messages: [...said, message, result], tools: [tool] })).choices[0].message.content, TOLD);
  },
  tool_picture: async () => {
    const tools = [{ type: "function", ...tool.function }];
    const first = await client.responses.create({ model: MODEL, input: QUESTION, tools });
    const output = [{ type: "input_image", image_url: PICTURE_URL }];
    const input = [{ type: "function_call_output", call_id: first.output[0].call_id, output }];
    const answer = await client.responses.create({ model: MODEL, input, previous_response_id: first.id });
    isEqual(answer.output_text, SHOWN);
  },
  thinking: async () => {
    const answer = await client.responses.create({ model: MODEL, input: THINK });
    isEqual(answer.output[0].content[0].text.trim(), THOUGHT);
    isEqual(answer.output_text.trim(), AFTER_THOUGHT);
  },
});
