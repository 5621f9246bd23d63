// Vercel's ai SDK: an object by a schema, from both of its providers, whole and streamed, and a forced tool.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, tool } from "ai";
import { z } from "zod";

const schema = z.strictObject({ x: z.int().min(0).max(9), colour: z.enum(["red", "green"]) });
const at = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const compatible = createOpenAICompatible({ name: "arl", supportsStructuredOutputs: true, ...at })("any");
const asked = { schema, prompt: "A point." };
for (const model of [compatible, createOpenAI(at)("any"), createOpenAI(at).chat("any")]) {
  console.log(JSON.stringify((await generateObject({ model, ...asked })).object));
}
let streamed;
for await (const partial of streamObject({ model: compatible, ...asked }).partialObjectStream) streamed = partial;
console.log(JSON.stringify(streamed));
const draw = tool({ description: "Draw.", inputSchema: schema });
const called = await generateText({ model: compatible, tools: { draw }, toolChoice: "required", prompt: "A point." });
console.log(JSON.stringify(called.toolCalls[0].input));
