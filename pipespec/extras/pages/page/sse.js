// Server-sent events of a reply to fetch, as EventSource sends no key.

/** The events as they come, each with its name and its data as text. */
export async function* serverSentEvents(reply) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = reply.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const fields = event.split("\n").map((line) => line.split(/: ?(.*)/s));
      const all = (name) => fields.filter(([its]) => its === name).map(([, text]) => text);
      const data = all("data");
      if (data.length) yield { name: all("event").at(-1) ?? "message", data: data.join("\n") };
    }
  }
}
