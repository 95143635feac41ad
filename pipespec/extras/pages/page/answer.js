// One answer of the server, piece by piece.

import { keyHeaders } from "./key.js";
import { serverSentEvents } from "./sse.js";

const REQUEST_NUMBER = "X-Pipespec-Request";

/** Why there is no answer, or no whole one: a sentence for the user. */
export class Problem extends Error {
  constructor(sentence, needsKey = false) {
    super(sentence);
    this.needsKey = needsKey;
  }
}

/** The names under which the model is served. Throws Problem. */
export async function servedModels() {
  const reply = await fetched("/v1/models", { headers: keyHeaders() });
  return (await reply.json()).data.map(({ id }) => id);
}

/** What is added to an answer: {content, reasoning, tokens, reason}, of which `tokens` counts all
 * so far and `reason` says why it ended. Ends early when `signal` is aborted. `began(number)` is
 * called with the number of the request in the cluster. Throws Problem. */
export async function* answerTo(body, signal, began) {
  const reply = await fetched("/v1/chat/completions", {
    method: "POST",
    headers: { ...keyHeaders(), "Content-Type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    }),
    signal,
  });
  began(Number(reply.headers.get(REQUEST_NUMBER)));
  const events = serverSentEvents(reply);
  for (;;) {
    const { value, done } = await events.next().catch(() => {
      throw new Problem("The connection was lost before the answer was complete.");
    });
    if (done) throw new Problem("The server ended before the answer was complete.");
    if (value.data === "[DONE]") return;
    const chunk = JSON.parse(value.data);
    if (chunk.error) throw new Problem(chunk.error.message);
    const [choice] = chunk.choices;
    yield {
      content: choice?.delta.content ?? "",
      reasoning: choice?.delta.reasoning_content ?? "",
      tokens: chunk.usage?.completion_tokens ?? null,
      reason: choice?.finish_reason ?? null,
    };
  }
}

async function fetched(path, options) {
  let reply;
  try {
    reply = await fetch(path, { cache: "no-store", ...options });
  } catch {
    throw new Problem("The server does not answer. It may have ended; try again.");
  }
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

async function refusal(reply) {
  if (reply.status === 401) return new Problem("This server needs an API key; enter it above.", true);
  const after = reply.headers.get("Retry-After");
  if (reply.status === 429) {
    return new Problem(`Too many requests are waiting; try again in ${after ?? "some"} seconds.`);
  }
  try {
    return new Problem((await reply.json()).error.message);
  } catch {
    return new Problem(`The server answered with the status ${reply.status}; try again.`);
  }
}
