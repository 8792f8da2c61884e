/** Chat: this window is a node that sends to one topic and listens to it. */
import { connect, MessagesError } from "../psqlmessages/node.js";

const RETRY_MS = 1000;
const MAX_LINES = 200;
const ABORTED = "56";

const chat = document.getElementById("chat");
const { topic, user } = chat.dataset;
const [state, participants, lines, form, text, button, identity] = [
  "state", "participants", "lines", "say", "text", "send", "ident",
].map((id) => document.getElementById(id));

// Each window needs its own node name: the server allows one WebSocket per node.
const suffix = crypto.getRandomValues(new Uint16Array(1))[0].toString(36);
const ident = `chat/${user}/${suffix}`;
identity.textContent = ident;

let node = null;
let isDatabaseAway = false;
// Registrations that are missing, for example because an administrator deleted the rule. Each is
// retried every second until a rule allows it.
const missing = new Set(["listen", "notify"]);

function showState(name, reason = "") {
  const words = {
    connecting: "connecting …",
    open: "live",
    away: "PostgreSQL is unreachable",
    muted: "a rule is missing",
    closed: "closed",
    denied: "refused",
  };
  state.dataset.state = name;
  state.textContent = reason ? `${words[name]}: ${reason}` : words[name];
  text.disabled = button.disabled = name !== "open";
}

function addLine(content, { from = "", kind = "note" } = {}) {
  const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 60;
  const line = document.createElement("li");
  line.className = kind;
  if (from) line.append(Object.assign(document.createElement("b"), { textContent: from }));
  line.append(content);
  lines.append(line);
  while (lines.childElementCount > MAX_LINES) lines.firstElementChild.remove();
  if (isAtEnd) lines.scrollTop = lines.scrollHeight;
}

/** The displayed name of a node: "alice · 4f2" for "chat/alice/4f2". */
function nameOf(sender) {
  const [, name, window] = /^chat\/([^/]+)\/([^/]+)$/.exec(sender) ?? [];
  if (sender === ident) return `${user} (you)`;
  return name ? `${name} · ${window}` : sender;
}

function onMessage(message) {
  const isMine = message.from === ident;
  const body = message.error ? message.error.message : String(message.body);
  addLine(body, { from: nameOf(message.from), kind: isMine ? "mine" : "other" });
}

async function showParticipants() {
  try {
    const { Listeners: listeners } = await node.status(topic);
    const others = listeners.filter((name) => name !== ident).map(nameOf);
    participants.textContent = others.length ? `Participants: you, ${others.join(", ")}.` : "You are the only participant. Open a second window.";
  } catch (error) {
    if (!(error instanceof MessagesError)) throw error;
    participants.textContent = "";
  }
}

function onEvent({ Evt: event, Ident: eventIdent, Topic: eventTopic, Err: error }) {
  if (event === "connection_lost" || event === "reconnected") {
    isDatabaseAway = event === "connection_lost";
    addLine(isDatabaseAway ? "PostgreSQL is unreachable." : "PostgreSQL is reachable again. Messages sent in between are lost.");
  } else if (eventTopic === topic && eventIdent === ident && /^topic_un/.test(event) && error !== ABORTED) {
    missing.add(event.replace("topic_un", ""));
    addLine(`You may no longer ${event === "topic_unlisten" ? "receive" : "send"} messages: the rule has changed.`);
  } else if (eventTopic === topic && event === "topic_listen") addLine(`${nameOf(eventIdent)} joined.`);
  else if (eventTopic === topic && event === "topic_unlisten") addLine(`${nameOf(eventIdent)} left.`);
  refresh();
}

function onState(name, reason) {
  showState(name, reason);
  if (name === "denied") forgetNode();
  refresh();
}

function refresh() {
  if (node === null || node.state !== "open") return;
  if (isDatabaseAway) showState("away");
  else showState(missing.size ? "muted" : "open");
  showParticipants();
}

async function connectNode() {
  try {
    node = await connect(ident, { onstate: onState, onevent: onEvent });
  } catch (error) {
    if (!(error instanceof MessagesError)) throw error;
    showState("denied", error.message);
  }
}

function forgetNode() {
  node = null;
  missing.add("listen").add("notify");
}

async function registerMissing() {
  for (const operation of [...missing]) {
    // The page may have been left during the previous request.
    if (node === null) return;
    try {
      await (operation === "listen" ? node.listen(topic, onMessage) : node.notify(topic));
      missing.delete(operation);
    } catch (error) {
      if (!(error instanceof MessagesError)) throw error;
    }
  }
}

/** Connect and register if necessary, now and every second. */
async function keepRegistered() {
  if (node === null) await connectNode();
  if (node !== null && node.state === "open" && !isDatabaseAway && missing.size) {
    await registerMissing();
    refresh();
  }
  setTimeout(keepRegistered, RETRY_MS);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = text.value;
  text.value = "";
  try {
    await node.send(topic, body);
  } catch (error) {
    addLine(`Not sent: ${error.message}`);
  }
  text.focus();
});
// If the browser shows this page again from its cache, keepRegistered connects a new node.
addEventListener("pagehide", () => {
  node?.close();
  forgetNode();
});

keepRegistered();
