/** The chat: this window is a node, and talks with the others through one topic. */
import { connect, MessagesError } from "../psqlmessages/node.js";

const AGAIN_MILLISECONDS = 1000;
const LINES = 200;

const chat = document.getElementById("chat");
const { topic, user } = chat.dataset;
const [state, who, lines, form, text, button, identity] = [
  "state", "who", "lines", "say", "text", "send", "ident",
].map((id) => document.getElementById(id));

// One name for each window: a name belongs to one WebSocket.
const suffix = crypto.getRandomValues(new Uint16Array(1))[0].toString(36);
const ident = `chat/${user}/${suffix}`;
identity.textContent = ident;

let node = null;
let isAway = false;
// What an administrator took away, or did not give yet: asked for again until it is there.
const wanted = new Set(["listen", "notify"]);

function show(name, reason = "") {
  const words = {
    connecting: "connecting …",
    open: "live",
    away: "PostgreSQL is away",
    muted: "a rule is missing",
    closed: "closed",
    denied: "refused",
  };
  state.dataset.state = name;
  state.textContent = reason ? `${words[name]}: ${reason}` : words[name];
  text.disabled = button.disabled = name !== "open";
}

function tell(content, { from = "", kind = "note" } = {}) {
  const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 60;
  const line = document.createElement("li");
  line.className = kind;
  if (from) line.append(Object.assign(document.createElement("b"), { textContent: from }));
  line.append(content);
  lines.append(line);
  while (lines.childElementCount > LINES) lines.firstElementChild.remove();
  if (isAtEnd) lines.scrollTop = lines.scrollHeight;
}

/** "chat/alice/4f2" is alice, in the window 4f2. */
function nameOf(sender) {
  const [, name, window] = /^chat\/([^/]+)\/([^/]+)$/.exec(sender) ?? [];
  if (sender === ident) return `${user} (you)`;
  return name ? `${name} · ${window}` : sender;
}

function heard(message) {
  const isMine = message.from === ident;
  const body = message.error ? message.error.message : String(message.body);
  tell(body, { from: nameOf(message.from), kind: isMine ? "mine" : "other" });
}

async function showWho() {
  try {
    const { Listeners: there } = await node.status(topic);
    const others = there.filter((name) => name !== ident).map(nameOf);
    who.textContent = others.length ? `Here: you, ${others.join(", ")}.` : "You are alone here. Open a second window.";
  } catch (error) {
    if (!(error instanceof MessagesError)) throw error;
    who.textContent = "";
  }
}

function happened({ Evt: event, Ident: subject, Topic: about, Err: why }) {
  if (event === "connection_lost" || event === "reconnected") {
    isAway = event === "connection_lost";
    tell(isAway ? "PostgreSQL is away." : "PostgreSQL is back; what was said meanwhile is lost.");
  } else if (about === topic && subject === ident && /^topic_un/.test(event) && why !== "56") {
    wanted.add(event.replace("topic_un", ""));
    tell(`A rule was taken away: you no longer ${event === "topic_unlisten" ? "hear" : "speak"} here.`);
  } else if (about === topic && event === "topic_listen") tell(`${nameOf(subject)} came.`);
  else if (about === topic && event === "topic_unlisten") tell(`${nameOf(subject)} left.`);
  present();
}

function present() {
  if (node === null || node.state !== "open") return;
  if (isAway) show("away");
  else if (wanted.size) show("muted");
  else show("open");
  showWho();
}

async function join() {
  for (const act of [...wanted]) {
    // The page may have been left meanwhile.
    if (node === null) return;
    try {
      await (act === "listen" ? node.listen(topic, heard) : node.notify(topic));
      wanted.delete(act);
    } catch (error) {
      if (!(error instanceof MessagesError)) throw error;
    }
  }
}

/** Come in, and again and again where it is refused: a rule may be on its way. */
async function come() {
  try {
    node = await connect(ident, { onstate: changed, onevent: happened });
  } catch (error) {
    if (!(error instanceof MessagesError)) throw error;
    show("denied", error.message);
  }
}

function changed(name, reason) {
  show(name, reason);
  if (name === "denied") {
    node = null;
    wanted.add("listen").add("notify");
  }
  present();
}

async function keep() {
  if (node === null) await come();
  if (node !== null && node.state === "open" && !isAway && wanted.size) {
    await join();
    present();
  }
  setTimeout(keep, AGAIN_MILLISECONDS);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const said = text.value;
  text.value = "";
  try {
    await node.send(topic, said);
  } catch (error) {
    tell(`Not sent: ${error.message}`);
  }
  text.focus();
});
// The page may be shown again as it was left: then it comes in anew.
addEventListener("pagehide", () => {
  node?.close();
  node = null;
  wanted.add("listen").add("notify");
});

keep();
