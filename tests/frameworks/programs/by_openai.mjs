// OpenAI's package for Node: an answer by a schema, and a forced tool.
import OpenAI from "openai";

const schema = {
  type: "object",
  properties: { x: { type: "integer", minimum: 0, maximum: 9 }, colour: { enum: ["red", "green"] } },
  required: ["x", "colour"],
  additionalProperties: false,
};
const client = new OpenAI();
const asked = { model: "any", messages: [{ role: "user", content: "A point." }] };
const format = { type: "json_schema", json_schema: { name: "point", schema, strict: true } };
const said = await client.chat.completions.parse({ ...asked, response_format: format });
const draw = { type: "function", function: { name: "draw", parameters: schema } };
const called = await client.chat.completions.create({ ...asked, tools: [draw], tool_choice: "required" });
console.log(JSON.stringify(said.choices[0].message.parsed));
console.log(JSON.stringify(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments)));
