// The chat page: conversations, and the answers that are being written.

import { Problem, answerTo, servedModels } from "./answer.js";
import { Conversations, newConversation, titleOf } from "./conversations.js";
import { byId, keep, make, write } from "./dom.js";
import { KeyForm } from "./key.js";
import { MessageView, sends } from "./messages.js";
import { Settings } from "./settings.js";
import { Stream } from "./stream.js";
import { recall, remember } from "./tab.js";
import { TreeView } from "./tree.js";
import { Drawing, collect } from "./writing.js";

const CURRENT = "pipespec-chat-current"; // the conversation of this tab
const SAVE_MS = 2000; // how often an answer is kept while it is written
const AGAIN_MS = 3000; // after which a server that did not answer is tried again
const NEAR = 60; // pixels from the end, at which the page follows an answer
const SPOKEN = 3000; // characters of an answer that a screen reader is given at once
const LOWEST_TREE = 90; // pixels

const settings = new Settings();
const running = new Map(); // answers by conversation: {controller, number, message}
const conversations = new Conversations({
  isOpen: (id) => running.has(id),
  changed: changedElsewhere,
  problem: (sentence) => notice(sentence),
});
let current = conversations.get(recall(CURRENT)) ?? newConversation();
let views = [];

const tree = new TreeView({
  tree: byId("tree"),
  words: byId("tree-words"),
  height: () => {
    const panel = byId("tree-panel");
    const most = Number.parseFloat(getComputedStyle(panel).maxHeight) || panel.clientHeight;
    return Math.max(LOWEST_TREE, most - (byId("tree").offsetTop - panel.offsetTop) - 20);
  },
});
const keyForm = new KeyForm("Use this key", async () => {
  if ((await connect()) && isUnanswered()) answer();
});
const stream = new Stream(onEvent, () => {}, () => keyForm.ask());

// --- the server ---------------------------------------------------------------------------------

/** Learn what is served; whether the server answers. */
async function connect() {
  try {
    const names = await servedModels();
    const { value } = byId("model-choice");
    byId("model-choice").replaceChildren(...names.map((name) => make("option", {}, name)));
    if (names.includes(value)) byId("model-choice").value = value;
    byId("models").hidden = names.length < 2;
    write(byId("model"), names.length < 2 ? names[0] : "");
    keyForm.hide();
    connection("", false);
    stream.watch(null); // for the labels
    return true;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.needsKey) keyForm.ask();
    else setTimeout(connect, AGAIN_MS);
    connection(error.message, true);
    return false;
  }
}

function connection(sentence, lost) {
  write(byId("connection"), sentence);
  byId("connection").classList.toggle("lost", lost);
}

function onEvent(name, data) {
  const number = running.get(current.id)?.number ?? null;
  if (name === "snapshot") {
    const labels = [data.time_scale !== null && "EMULATED", data.synthetic && "SYNTHETIC"];
    write(byId("labels"), labels.filter(Boolean).join(", "));
    if (number === null || !settings.showsTree) stream.close();
  } else if (data.tree && data.tree.request === number) {
    tree.show(data.tree);
  }
}

/** Watch the tree of the answer that is shown, if that is wanted and there is one. */
function watch() {
  byId("tree-panel").hidden = !settings.showsTree || !byId("settings").hidden;
  byId("show-tree").setAttribute("aria-expanded", String(settings.showsTree));
  const number = running.get(current.id)?.number ?? null;
  if (settings.showsTree && number !== null) {
    tree.clear("Waiting for the next step.");
    stream.watch(number);
  } else if (tree.request === null) {
    tree.clear("Send a message to watch the tree of its answer.");
  }
}

// --- answers ------------------------------------------------------------------------------------

const isUnanswered = () =>
  current.messages.at(-1)?.role === "user" || Boolean(current.messages.at(-1)?.problem);

/** What is sent of messages. Answers without text are left out, and what the user wrote before and
 * after one becomes one message, as templates may want roles that alternate. */
function turns(messages) {
  const found = [];
  for (const { role, content } of messages) {
    if (role === "assistant" && !content) continue;
    if (role === "user" && found.at(-1)?.role === role) found.at(-1).content += `\n\n${content}`;
    else found.push({ role, content });
  }
  return found;
}

/** Answer the last message of the user, instead of the answer that there may be. */
async function answer() {
  const conversation = current;
  if (running.has(conversation.id)) return;
  if (settings.invalid) return showInvalid();
  if (conversation.messages.at(-1).role === "assistant") conversation.messages.pop();
  const asked = turns(conversation.messages);
  if (settings.system) asked.unshift({ role: "system", content: settings.system });
  const message = { role: "assistant", content: "", reasoning: "" };
  conversation.messages.push(message);
  const controller = new AbortController();
  const its = { controller, message, number: null };
  running.set(conversation.id, its);
  conversations.save(conversation);
  let saved = performance.now();
  notice();
  showAll();
  write(byId("announcement"), "The model answers.");
  const drawing = new Drawing(() => showAnswer(conversation, message));
  const changed = () => {
    drawing.request();
    if (performance.now() - saved < SAVE_MS) return;
    saved = performance.now();
    conversations.update(conversation);
  };
  const body = { ...settings.fields, messages: asked };
  if (!byId("models").hidden) body.model = byId("model-choice").value;
  try {
    const began = (number) => {
      its.number = number;
      if (conversation === current) watch();
    };
    await collect(message, answerTo(body, controller.signal, began), changed);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (!controller.signal.aborted) message.problem = error.message;
    if (error.needsKey) keyForm.ask();
  } finally {
    if (controller.signal.aborted) message.stopped = true;
    running.delete(conversation.id);
    conversations.update(conversation);
    drawing.end();
    showState();
    if (conversation === current) announce(message);
  }
}

/** Show an answer as it is now. */
function showAnswer(conversation, message) {
  const view = views.find((each) => each.message === message);
  if (conversation !== current || !view) return;
  const follows = isAtEnd();
  view.show({ open: running.has(conversation.id), isLast: true });
  if (follows) scrollToEnd();
}

function announce({ content, problem, stopped }) {
  const text = content.length > SPOKEN ? `${content.slice(0, SPOKEN)} …` : content;
  write(byId("announcement"), problem ?? (stopped ? "Stopped." : `Answer: ${text}`));
}

const stop = () => running.get(current.id)?.controller.abort();

// --- what is shown ------------------------------------------------------------------------------

const isAtEnd = () => {
  const { scrollTop, scrollHeight, clientHeight } = byId("scroll");
  return scrollHeight - scrollTop - clientHeight < NEAR;
};

function scrollToEnd() {
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

/** Show the current conversation. */
function showAll() {
  const actions = {
    regenerate: answer,
    edit: (text) => {
      if (settings.invalid) {
        showInvalid();
        return false;
      }
      while (current.messages.at(-1).role === "assistant") current.messages.pop();
      current.messages.at(-1).content = text;
      answer();
      return true;
    },
  };
  views = current.messages.map((message) => new MessageView(message, actions));
  byId("messages").replaceChildren(...views.map(({ element }) => element));
  const { messages } = current;
  const lastOf = (role) => messages.findLastIndex((message) => message.role === role);
  views.forEach((view, place) => {
    const open = running.get(current.id)?.message === view.message;
    view.show({ open, isLast: place === lastOf(view.message.role) });
  });
  remember(CURRENT, current.id);
  showState();
  scrollToEnd();
}

/** Show which conversations there are, and what may be done now. */
function showState() {
  const isRunning = running.has(current.id);
  write(byId("title"), titleOf(current));
  document.title = `${titleOf(current)} – pipespec`;
  byId("welcome").hidden = current.messages.length > 0;
  byId("of-conversation").hidden = !current.messages.length;
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  for (const each of document.querySelectorAll(".message.user .edit")) each.disabled = isRunning;
  const all = conversations.list();
  const items = keep(byId("conversations"), all.map(({ id }) => id), listed);
  for (const conversation of all) {
    const button = items.get(conversation.id).firstChild;
    write(button, titleOf(conversation));
    if (conversation.id === current.id) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}

function listed(id) {
  const button = make("button", { type: "button", dir: "auto" });
  button.addEventListener("click", () => {
    choose(conversations.get(id));
    byId("message").focus();
  });
  return make("li", {}, button);
}

function choose(conversation) {
  current = conversation;
  byId("rename-form").hidden = true;
  showList(false);
  tree.clear("");
  showAll();
  watch();
}

function changedElsewhere(id) {
  const found = conversations.get(id);
  if (!found) running.get(id)?.controller.abort();
  if (id !== current.id) return showState();
  if (!found) return choose(newConversation());
  current = found;
  showAll();
}

/** Tell the user something, and what can be done about it; without: nothing any more. */
function notice(sentence = "", word = "", action = null) {
  const button = action && make("button", { type: "button" }, word);
  button?.addEventListener("click", () => {
    notice();
    action();
  });
  byId("notice").replaceChildren(...[sentence, button].filter(Boolean));
}

function showSettings(shown) {
  byId("settings").hidden = !shown;
  byId("show-settings").setAttribute("aria-expanded", String(shown));
  watch();
}

/** Show the setting that has no valid value. */
function showInvalid() {
  showSettings(true);
  settings.invalid.reportValidity();
}

function showList(shown) {
  if (shown) showSettings(false); // on phones they share a place
  byId("sidebar").classList.toggle("shown", shown);
  byId("show-list").setAttribute("aria-expanded", String(shown));
}

// --- controls -----------------------------------------------------------------------------------

const field = byId("message");

function fit() {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

const onClick = (id, action) => byId(id).addEventListener("click", action);

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running.has(current.id) || !field.value.trim()) return;
  if (settings.invalid) return showInvalid();
  current.messages.push({ role: "user", content: field.value });
  field.value = "";
  fit();
  answer();
});
field.addEventListener("input", fit);
field.addEventListener("keydown", (event) => {
  if (sends(event)) {
    event.preventDefault();
    byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !field.value && !running.has(current.id)) {
    const view = views.findLast(({ message }) => message.role === "user");
    if (!view) return;
    event.preventDefault();
    view.edit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running.has(current.id)) stop();
  else if (byId("sidebar").classList.contains("shown")) leave(showList, "show-list");
  else if (!byId("settings").hidden) leave(showSettings, "show-settings");
});

/** Hide a panel, and go back to the button that shows it. */
function leave(show, button) {
  show(false);
  byId(button).focus();
}

onClick("stop", () => {
  stop();
  field.focus();
});
onClick("new", () => {
  choose(newConversation());
  field.focus();
});
onClick("show-list", () => showList(!byId("sidebar").classList.contains("shown")));
onClick("show-settings", () => showSettings(byId("settings").hidden));
onClick("show-tree", () => {
  settings.showsTree = !settings.showsTree;
  settings.save();
  watch();
});
onClick("rename", () => {
  byId("rename-form").hidden = false;
  byId("name").value = titleOf(current);
  byId("name").select();
});
function endRename() {
  byId("rename-form").hidden = true;
  byId("rename").focus();
}

onClick("rename-cancel", endRename);
byId("rename-form").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  endRename();
});
byId("rename-form").addEventListener("submit", (event) => {
  event.preventDefault();
  current.title = byId("name").value.trim();
  conversations.save(current);
  showState();
  endRename();
});
onClick("delete", () => {
  const deleted = current;
  stop();
  conversations.remove(deleted.id);
  choose(newConversation());
  notice(`Deleted: ${titleOf(deleted)}`, "Undo", () => {
    conversations.save(deleted);
    choose(deleted);
  });
  byId("notice").querySelector("button").focus();
});
onClick("export", () => {
  const file = new Blob([JSON.stringify(current, null, 2)], { type: "application/json" });
  const href = URL.createObjectURL(file);
  make("a", { href, download: `conversation-${current.id}.json` }).click();
  URL.revokeObjectURL(href);
});
addEventListener("pagehide", () => {
  for (const id of running.keys()) conversations.update(conversations.get(id));
});

showAll();
watch();
field.focus();
connect();
