import OpenAI from "openai";

const client = new OpenAI({ baseURL: BASE, apiKey: "none", maxRetries: 0 });
const completions = client.chat.completions;
const ask = (content, more = {}) => ({ model: "demo", messages: [{ role: "user", content }], ...more });
const text = (answer) => answer.choices[0].message.content;

const found = { chat: text(await completions.create(ask(CHAT))), stream: "" };
for await (const part of await completions.create(ask(CHAT, { stream: true }))) {
  found.stream += part.choices[0]?.delta.content ?? "";
}
const weather = ({ city }) => RESULT[city];
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = { type: "function", function: { name: "weather", function: weather, parse: JSON.parse, parameters: city } };
found.tool = await completions.runTools(ask(TOOL, { tools: [tool] })).finalContent();
const schema = { name: "person", schema: PERSON, strict: true };
const structured = await completions.parse(ask(STRUCTURED, { response_format: { type: "json_schema", json_schema: schema } }));
found.structured = JSON.parse(text(structured));
