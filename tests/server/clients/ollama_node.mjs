import { Ollama } from "ollama";

const client = new Ollama({ host: URL });
const user = (content) => ({ role: "user", content });
const chat = (messages, more = {}) => client.chat({ model: "demo", messages, ...more });

const found = { chat: (await chat([user(CHAT)])).message.content, stream: "" };
for await (const part of await chat([user(CHAT)], { stream: true })) found.stream += part.message.content;
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "The weather.", parameters: city } }];
const called = (await chat([user(TOOL)], { tools })).message;
const content = RESULT[called.tool_calls[0].function.arguments.city];
const result = { role: "tool", tool_name: "weather", content };
found.tool = (await chat([user(TOOL), called, result], { tools })).message.content;
found.structured = JSON.parse((await chat([user(STRUCTURED)], { format: PERSON })).message.content);
