// openai-node: plain, streamed, tools, JSON schema, responses.
import assert from "node:assert";
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "what is the sum of these two numbers?" }];
const parameters = {
  type: "object",
  properties: { a: { type: "integer", maximum: 9 }, b: { type: "integer", maximum: 9 } },
  required: ["a", "b"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "add", description: "Add.", parameters } }];

const plain = await client.chat.completions.create({ model, messages, max_tokens: 30, seed: 1 });
assert.equal(plain.usage.completion_tokens, 30);

let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 30, seed: 1, stream: true }))
  streamed += chunk.choices[0].delta.content ?? "";
assert.equal(streamed, plain.choices[0].message.content);

const asked = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
const called = await client.chat.completions.create(asked);
assert.deepEqual(Object.keys(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments)).sort(), ["a", "b"]);
const final = await client.chat.completions.stream(asked).finalChatCompletion();
assert.equal(final.choices[0].finish_reason, "tool_calls");

const schema = { type: "json_schema", json_schema: { name: "point", schema: parameters } };
const formed = await client.chat.completions.create({ model, messages, response_format: schema, max_tokens: 100 });
assert.deepEqual(Object.keys(JSON.parse(formed.choices[0].message.content)).sort(), ["a", "b"]);

const response = await client.responses.create({ model, input: "hello", max_output_tokens: 6 });
assert.equal(response.usage.output_tokens, 6);
await assert.rejects(client.chat.completions.create({ model: "none", messages }), { status: 404 });
console.log("ok");
