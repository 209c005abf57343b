import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const asked = (messages, more = {}) => ({
  model: "demo",
  max_tokens: 200,
  messages: messages.map((content, i) => ({ role: i % 2 ? "assistant" : "user", content })),
  ...more,
});

const found = { chat: (await client.messages.create(asked([CHAT]))).content[0].text };
found.stream = await client.messages.stream(asked([CHAT])).finalText();
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "weather", input_schema: city }];
const called = (await client.messages.create(asked([TOOL], { tools }))).content;
const call = called.find((block) => block.type === "tool_use");
const result = [{ type: "tool_result", tool_use_id: call.id, content: RESULT[call.input.city] }];
found.tool = (await client.messages.create(asked([TOOL, called, result], { tools }))).content[0].text;
const output_config = { format: { type: "json_schema", schema: PERSON } };
found.structured = JSON.parse((await client.messages.create(asked([STRUCTURED], { output_config }))).content[0].text);
