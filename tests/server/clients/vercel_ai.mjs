import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, jsonSchema, Output, streamText, tool } from "ai";

const provider = createOpenAICompatible({ name: "outpace", baseURL: BASE, apiKey: "none", supportsStructuredOutputs: true });
const asked = (prompt, more = {}) => ({ model: provider("demo"), maxRetries: 0, prompt, ...more });

const found = { chat: (await generateText(asked(CHAT))).text, stream: "" };
for await (const part of streamText(asked(CHAT)).textStream) found.stream += part;
const city = jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] });
const weather = tool({ description: "The weather.", inputSchema: city, execute: async ({ city }) => RESULT[city] });
found.tool = (await generateText(asked(TOOL, { tools: { weather }, stopWhen: isStepCount(3) }))).text;
const output = Output.object({ schema: jsonSchema(PERSON) });
found.structured = (await generateText(asked(STRUCTURED, { output }))).output;
