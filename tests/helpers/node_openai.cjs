// What OpenAI's package for Node makes of a server's answers, as one JSON object on standard output.
// Its arguments: the address and the key of the server, and a JSON object with `model`, `messages`
// and `schema`.
const OpenAI = require("openai");

const [baseURL, apiKey, given] = process.argv.slice(2);
const { model, messages, schema } = JSON.parse(given);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const greedy = { model, temperature: 0 };

async function chat() {
  const asked = { ...greedy, messages, max_completion_tokens: 24 };
  const whole = await client.chat.completions.create(asked);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    streamed += chunk.choices[0]?.delta.content ?? "";
  }
  return { whole: whole.choices[0].message.content, streamed };
}

async function responses() {
  const asked = { ...greedy, input: messages, max_output_tokens: 24 };
  const whole = await client.responses.create(asked);
  const stream = client.responses.stream(asked);
  const events = [];
  for await (const event of stream) events.push(event.type);
  const last = await stream.finalResponse();
  return { whole: whole.output_text, streamed: last.output_text, events };
}

async function tools() {
  const tool = { type: "function", function: { name: "look_up", parameters: schema } };
  const asked = { model, messages, tools: [tool], parallel_tool_calls: false };
  const stream = client.chat.completions.stream({ ...asked, tool_choice: "required" });
  const message = (await stream.finalChatCompletion()).choices[0].message;
  const [call] = message.tool_calls;
  const later = [...messages, message, { role: "tool", tool_call_id: call.id, content: "Sunny." }];
  const rest = { messages: later, tool_choice: "none", max_completion_tokens: 4 };
  const answer = await client.chat.completions.create({ ...asked, ...rest });
  return { arguments: call.function.arguments, tokens: answer.usage.completion_tokens };
}

async function structured() {
  const format = { type: "json_schema", json_schema: { name: "person", schema, strict: true } };
  const asked = { model, messages, response_format: format };
  const parsed = await client.chat.completions.parse(asked);
  return parsed.choices[0].message.parsed;
}

async function refused() {
  try {
    await client.chat.completions.create({ model: "other", messages });
  } catch (error) {
    return error.constructor.name;
  }
}

async function main() {
  const found = {};
  for (const part of [chat, responses, tools, structured, refused]) found[part.name] = await part();
  console.log(JSON.stringify(found));
}

main();
