/**
 * Node: a node of psqlmessages in a browser, over the WebSocket /ws/node/. See docs/relay.md.
 *
 * @typedef {"connecting" | "open" | "closed" | "denied"} State
 * @typedef {object} Message
 * @property {"Topic" | "Rpc" | "Return"} type
 * @property {string} from - the node that sent it
 * @property {string} to - the topic, or this node
 * @property {any} body - string, Uint8Array, or a JSON value
 * @property {MessagesError=} error - the reason if there is no body
 * @property {string=} token - set if the sender expects an answer
 * @property {(body: any) => Promise<object>} reply
 * @property {object} header - the whole frame
 * @typedef {object} Options
 * @property {string=} url - an address, or a path relative to this page; by default /ws/node/
 * @property {boolean=} events - false: receive only events about this node
 * @property {(state: State, reason: string) => void=} onstate
 * @property {(event: object) => void=} onevent - a system event, with Evt, Ident, Topic
 * @property {(message: Message) => void=} onmessage - for messages without another handler
 */

const DENIED_CODE = 4401;
const [ABORTED, AWAY] = [56, 59];
const PASSING = [ABORTED, AWAY];
// The ident is refused permanently. Other errors are temporary, for example 8 while an earlier
// connection ends.
const DENIALS = [4, 5, 7, 54];
// Milliseconds.
const [LEAST_DELAY, MOST_DELAY, WAIT] = [250, 10_000, 5000];

/** An error returned by PostgreSQL or the relay; docs/errors.md lists the numbers. */
export class MessagesError extends Error {
  name = "MessagesError";

  /** @param {number | null} number @param {string} text */
  constructor(number, text) {
    super(text);
    this.number = number;
  }
}

/**
 * Register a node. Retries while the server is unreachable; throws if the node is refused.
 * @param {string} ident @param {Options=} options @returns {Promise<Node>}
 */
export async function connect(ident, options = {}) {
  const node = new Node(ident, options);
  await node._opened.promise;
  return node;
}

/** A node that stays registered until it is closed, and reconnects after lost connections. */
export class Node {
  _topics = { topic_listen: new Map(), topic_notify: new Map() };
  _putOff = new Set();
  _requests = new Map();
  _calls = new Map();
  _count = 0;
  _attempts = 0;
  _isFirst = true;
  _opened = deferred();
  _prefix = crypto.getRandomValues(new Uint32Array(3)).join("-");

  constructor(ident, options) {
    this.ident = ident;
    this._options = options;
    const url = new URL(options.url ?? "/ws/node/", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    this._url = url.href;
    this._connect();
  }

  /**
   * Receive a topic's messages. Retries if PostgreSQL aborts the call, for example because of a lock
   * on the topic; so do notify, unlisten and unnotify.
   * @param {string} topic @param {(m: Message) => void} handler
   */
  async listen(topic, handler) {
    await this._join("topic_listen", topic, handler);
  }

  /** Stop receiving a topic's messages. @param {string} topic */
  async unlisten(topic) {
    await this._leave("topic_listen", topic);
  }

  /** Register as a sender of a topic. @param {string} topic */
  async notify(topic) {
    await this._join("topic_notify", topic, {});
  }

  /** Stop being a sender of a topic. @param {string} topic */
  async unnotify(topic) {
    await this._leave("topic_notify", topic);
  }

  /** Send to a topic's listeners. @param {string} topic @param {any} body */
  async send(topic, body, { token } = {}) {
    await this._request("topic_send", { topic, token: token ?? null, ...encoded(body) });
  }

  /** The current senders and listeners: {Notifiers, Listeners}. @param {string} topic */
  status(topic) {
    return this._request("topic_status", { topic });
  }

  /**
   * Call a node and wait for its answer, at most `timeout` milliseconds. Throws 56 if the node
   * answered with an error. @param {string} node @param {any} body @returns {Promise<any>}
   */
  async call(node, body, { timeout = WAIT } = {}) {
    const token = `${this._prefix}-${++this._count}`;
    const asked = { node, ...deferred() };
    this._calls.set(token, asked);
    const late = new MessagesError(null, `${node} did not answer in time`);
    const timer = setTimeout(asked.reject, timeout, late);
    try {
      await this._request("rpc", { node, token, ...encoded(body) });
      return await asked.promise;
    } finally {
      clearTimeout(timer);
      this._calls.delete(token);
    }
  }

  /** Answer calls with the handler's return value. @param {(message: Message) => any} handler */
  onCall(handler) {
    this._oncall = handler;
  }

  /** Deregister and disconnect. */
  close() {
    this._end("closed", new MessagesError(null, "the node is closed"));
    this._socket?.close(1000);
  }

  // Connection

  _connect() {
    this._become("connecting", "");
    const socket = (this._socket = new WebSocket(this._url));
    socket.onopen = () => this._register(socket);
    socket.onmessage = ({ data }) => this._came(JSON.parse(data));
    socket.onclose = ({ code, reason }) => this._lost(code, reason);
  }

  async _register(socket) {
    try {
      await this._ask("init", { ident: this.ident, events: this._options.events ?? true });
    } catch (error) {
      const { number } = error;
      const isFinal = this._isFirst ? !PASSING.includes(number) : DENIALS.includes(number);
      if (isFinal) this._end("denied", error);
      socket.close();
      return;
    }
    for (const [op, topics] of Object.entries(this._topics)) {
      for (const topic of topics.keys()) {
        await this._ask(op, { topic }).catch((error) => this._refused(op, topic, error));
      }
    }
    if (socket !== this._socket || socket.readyState !== WebSocket.OPEN) return;
    this._isFirst = false;
    this._openedAt = Date.now();
    this._become("open", "");
    this._opened.resolve();
  }

  _lost(code, reason) {
    const error = new MessagesError(AWAY, "the connection to the relay is lost");
    for (const request of this._requests.values()) request.reject(error);
    this._requests.clear();
    if (this._isOver) return;
    if (code === DENIED_CODE) return this._end("denied", new MessagesError(null, reason));
    // Reset the backoff only after a connection that has lasted.
    if (this.state === "open" && Date.now() - this._openedAt > WAIT) this._attempts = 0;
    if (this.state === "open") this._opened = deferred();
    this._become("connecting", reason);
    const connect = () => this.state === "connecting" && this._connect();
    setTimeout(connect, delay(this._attempts++));
  }

  _end(state, error) {
    this._opened.reject(error);
    for (const call of this._calls.values()) call.reject(error);
    this._become(state, error.message);
  }

  _become(state, reason) {
    const isNew = this.state !== state || reason !== "";
    this.state = state;
    if (isNew) this._options.onstate?.(state, reason);
  }

  get _isOver() {
    return ["closed", "denied"].includes(this.state);
  }

  /** Send a request when the node is registered; wait at most `WAIT` for that. */
  async _request(op, fields) {
    if (this._isOver) throw new MessagesError(null, `the node is ${this.state}`);
    if (this.state !== "open") {
      const late = new MessagesError(AWAY, "there is no connection to the relay");
      const wait = new Promise((_, reject) => setTimeout(reject, WAIT, late));
      await Promise.race([this._opened.promise, wait]);
    }
    return this._ask(op, fields);
  }

  _ask(op, fields) {
    const ref = ++this._count;
    const request = deferred();
    this._requests.set(ref, request);
    this._socket.send(JSON.stringify({ op, ref, ...fields }));
    return request.promise;
  }

  // Topics

  async _join(op, topic, value) {
    const topics = this._topics[op];
    const earlier = topics.get(topic);
    // A message may arrive before the answer.
    topics.set(topic, value);
    try {
      await this._change(op, topic, () => topics.get(topic) === value);
    } catch (error) {
      if (topics.get(topic) === value) topics.delete(topic);
      if (earlier && error.number === AWAY) topics.set(topic, earlier);
      throw error;
    }
  }

  async _leave(op, topic) {
    this._topics[op].delete(topic);
    await this._change(ended(op), topic, () => !this._topics[op].has(topic));
  }

  /** Retry until the request succeeds, is refused, or is obsolete. */
  async _change(op, topic, isWanted, passing = [ABORTED]) {
    for (let attempts = 0; ; attempts++) {
      try {
        return await this._request(op, { topic });
      } catch (error) {
        if (!passing.includes(error.number)) throw error;
        await new Promise((done) => setTimeout(done, delay(attempts)));
        if (!isWanted()) throw error;
      }
    }
  }

  /** Report that a registration from before the reconnect was refused. */
  _refused(op, topic, { number }) {
    if (number === AWAY) return;
    const event = { Type: "Sys", Evt: ended(op), Ident: this.ident, Topic: topic };
    this._heard({ ...event, Err: String(number) });
  }

  /** Repeat a registration that was aborted, then report it. */
  async _again(op, topic) {
    const [topics, key] = [this._topics[op], `${op} ${topic}`];
    const value = topics.get(topic);
    if (this._putOff.has(key)) return;
    this._putOff.add(key);
    try {
      await this._change(op, topic, () => topics.get(topic) === value, PASSING);
    } catch (error) {
      if (!this._isOver && !PASSING.includes(error.number)) this._refused(op, topic, error);
      return;
    } finally {
      this._putOff.delete(key);
    }
    this._options.onevent?.({ Type: "Sys", Evt: op, Ident: this.ident, Topic: topic });
  }

  // Incoming frames

  _came(frame) {
    if ("ref" in frame) return this._answered(frame);
    if (frame.Type === "Sys") return this._heard(frame);
    const message = this._message(frame);
    const asked = frame.Type === "Return" && this._calls.get(frame.Token);
    const listener = frame.Type === "Topic" && this._topics.topic_listen.get(message.to);
    if (asked) this._returned(asked, message);
    else if (frame.Type === "Rpc" && this._oncall) this._serve(message);
    else (listener || this._options.onmessage)?.(message);
  }

  _answered({ ref, ...answer }) {
    const { resolve, reject } = this._requests.get(ref);
    this._requests.delete(ref);
    if (answer.Err === "0") resolve(answer);
    else reject(new MessagesError(Number(answer.Err), answer.Errstr));
  }

  _heard(event) {
    const { Evt: name, Ident: ident, Topic: topic } = event;
    const isPassing = PASSING.includes(Number(event.Err));
    if (ident === this.ident && name === "disconnect" && isPassing) {
      // It could not be registered again together with the relay's other nodes: reconnect.
      return this._socket.close();
    }
    if (ident === this.ident && name === "disconnect") {
      this._end("denied", new MessagesError(null, "the node was disconnected"));
      this._socket.close(1000);
    } else if (ident === this.ident && name.includes("_un")) {
      const op = name.replace("_un", "_");
      if (isPassing && this._topics[op]?.has(topic)) this._again(op, topic);
      else this._topics[op]?.delete(topic);
    } else if (name === "disconnect" || name === "crash") {
      const error = new MessagesError(null, `${ident} has gone`);
      for (const call of this._calls.values()) if (call.node === ident) call.reject(error);
    }
    this._options.onevent?.(event);
  }

  _returned(asked, { body, error }) {
    if (!error) asked.resolve(body);
    else asked.reject(error.number === 56 ? new MessagesError(56, body || error.message) : error);
  }

  _message(frame) {
    const { Type: type, From: from, To: to, Token: token, Err: number = "0" } = frame;
    const message = { type, from, to, token, header: frame };
    if (number !== "0") message.error = new MessagesError(Number(number), frame.Errstr);
    try {
      message.body = decoded(frame.Body, frame.Enc);
    } catch (error) {
      message.error = new MessagesError(null, `the body is not ${frame.Enc}: ${error.message}`);
    }
    message.reply = (body) => this._request("return", { node: from, token, ...encoded(body) });
    return message;
  }

  _serve(message) {
    const { from: node, token } = message;
    const fail = (error) => {
      // Log the error here; the caller only learns its name.
      const isTold = error instanceof MessagesError;
      if (!isTold) console.error(error);
      const reason = isTold ? error.message : String(error?.name);
      return this._request("return_error", { node, token, reason });
    };
    const answer = (async () => this._oncall(message))().then(message.reply, fail);
    answer.catch((error) => this._isOver || console.warn(`not answered: ${error.message}`));
  }
}

/** The delay before the next attempt in milliseconds, randomized so that pages do not retry together. */
function delay(attempts) {
  const most = Math.min(MOST_DELAY, LEAST_DELAY * 2 ** Math.min(attempts, 10));
  return most * (0.5 + Math.random() / 2);
}

/** Return the opposite operation: "topic_unlisten" for "topic_listen". */
function ended(op) {
  return op.replace("_", "_un");
}

function deferred() {
  const made = {};
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }));
  // A rejection that nothing awaits is not an error.
  made.promise.catch(() => {});
  return made;
}

function encoded(value) {
  if (typeof value === "string") return { body: value };
  if (!(value instanceof Uint8Array)) return { body: JSON.stringify(value ?? null), enc: "json" };
  return { body: btoa(Array.from(value, (byte) => String.fromCharCode(byte)).join("")), enc: "b64" };
}

function decoded(text, enc) {
  if (text === undefined || enc === undefined) return text;
  if (enc === "json") return JSON.parse(text);
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}
