/**
 * Node: a node of psqlmessages in a browser, over the WebSocket /ws/node/. See docs/reference/relay.md.
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
 * @property {string=} url - an address, or a path relative to this page; by default /ws/node/ below the site's prefix
 * @property {boolean=} events - false: receive only events about this node
 * @property {(state: State, reason: string) => void=} onstate
 * @property {(event: object) => void=} onevent - a system event, with Evt, Ident, Topic
 * @property {(message: Message) => void=} onmessage - for messages without another handler
 */

const DENIED_CODE = 4401;
const ABORTED = 56;
const UNREACHABLE = 59;
const TEMPORARY = [ABORTED, UNREACHABLE];
// After a reconnect, only these errors refuse the ident permanently. All others are temporary: for
// example 8, until the earlier connection has ended.
const DENIED_ERRORS = [4, 5, 7, 54];
const [MIN_DELAY_MS, MAX_DELAY_MS, TIMEOUT_MS] = [250, 10_000, 5000];

/** An error returned by PostgreSQL or the relay; docs/reference/errors.md lists the numbers. */
export class MessagesError extends Error {
  name = "MessagesError";

  /** @param {number | null} number @param {string} text */
  constructor(number, text) {
    super(text);
    this.number = number;
  }
}

/** The WebSocket below the prefix of the site, if this script is in the site's `static/`; else /ws/node/. */
function defaultUrl() {
  const { origin, pathname } = new URL(import.meta.url);
  const prefix = /^(.*\/)static\/psqlmessages\/[^/]*$/.exec(pathname);
  return `${(origin === location.origin && prefix?.[1]) || "/"}ws/node/`;
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
  _retrying = new Set();
  _requests = new Map();
  _calls = new Map();
  _count = 0;
  _attempts = 0;
  _isFirst = true;
  _opened = deferred();
  _tokenPrefix = crypto.getRandomValues(new Uint32Array(3)).join("-");

  constructor(ident, options) {
    this.ident = ident;
    this._options = options;
    const url = new URL(options.url ?? defaultUrl(), location.href);
    url.protocol = url.protocol.replace("http", "ws");
    this._url = url.href;
    this._connect();
  }

  /**
   * Receive a topic's messages. Like notify, unlisten and unnotify, it retries if PostgreSQL aborts
   * the call, for example because of a lock on the topic.
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
    await this._request("topic_send", { topic, token: token ?? null, ...encode(body) });
  }

  /** The current senders and listeners: {Notifiers, Listeners}. @param {string} topic */
  status(topic) {
    return this._request("topic_status", { topic });
  }

  /**
   * Call a node and wait for its answer, at most `timeout` milliseconds. Throws a MessagesError, with the
   * number 56 if the node answered with an error. @param {string} node @param {any} body @returns {Promise<any>}
   */
  async call(node, body, { timeout = TIMEOUT_MS } = {}) {
    const token = `${this._tokenPrefix}-${++this._count}`;
    const call = { node, ...deferred() };
    this._calls.set(token, call);
    const timeoutError = new MessagesError(null, `${node} did not answer in time`);
    const timer = setTimeout(call.reject, timeout, timeoutError);
    try {
      await this._request("rpc", { node, token, ...encode(body) });
      return await call.promise;
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
    this._setState("connecting", "");
    const socket = (this._socket = new WebSocket(this._url));
    socket.onopen = () => this._register(socket);
    socket.onmessage = ({ data }) => this._onFrame(JSON.parse(data));
    socket.onclose = ({ code, reason }) => this._onClose(code, reason);
  }

  async _register(socket) {
    try {
      await this._send("init", { ident: this.ident, events: this._options.events ?? true });
    } catch (error) {
      const { number } = error;
      const isFinal = this._isFirst ? !TEMPORARY.includes(number) : DENIED_ERRORS.includes(number);
      if (isFinal) this._end("denied", error);
      socket.close();
      return;
    }
    for (const [op, topics] of Object.entries(this._topics)) {
      for (const topic of topics.keys()) {
        await this._send(op, { topic }).catch((error) => this._reportRefusal(op, topic, error));
      }
    }
    if (socket !== this._socket || socket.readyState !== WebSocket.OPEN) return;
    this._isFirst = false;
    this._openedAt = Date.now();
    this._setState("open", "");
    this._opened.resolve();
  }

  _onClose(code, reason) {
    const error = new MessagesError(UNREACHABLE, "the connection to the relay is lost");
    for (const request of this._requests.values()) request.reject(error);
    this._requests.clear();
    if (this._isEnded) return;
    if (code === DENIED_CODE) return this._end("denied", new MessagesError(null, reason));
    // Reset the backoff only after a connection that has lasted.
    if (this.state === "open" && Date.now() - this._openedAt > TIMEOUT_MS) this._attempts = 0;
    if (this.state === "open") this._opened = deferred();
    this._setState("connecting", reason);
    const connect = () => this.state === "connecting" && this._connect();
    setTimeout(connect, delay(this._attempts++));
  }

  _end(state, error) {
    this._opened.reject(error);
    for (const call of this._calls.values()) call.reject(error);
    this._setState(state, error.message);
  }

  _setState(state, reason) {
    const isChange = this.state !== state || reason !== "";
    this.state = state;
    if (isChange) this._options.onstate?.(state, reason);
  }

  get _isEnded() {
    return ["closed", "denied"].includes(this.state);
  }

  /** Send a request; first wait up to `TIMEOUT_MS` until the node is registered. */
  async _request(op, fields) {
    if (this._isEnded) throw new MessagesError(null, `the node is ${this.state}`);
    if (this.state !== "open") {
      const error = new MessagesError(UNREACHABLE, "there is no connection to the relay");
      const timeout = new Promise((_, reject) => setTimeout(reject, TIMEOUT_MS, error));
      await Promise.race([this._opened.promise, timeout]);
    }
    return this._send(op, fields);
  }

  _send(op, fields) {
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
    // Set before the request: a message may arrive before the answer.
    topics.set(topic, value);
    try {
      await this._sendRetrying(op, topic, () => topics.get(topic) === value);
    } catch (error) {
      if (topics.get(topic) === value) topics.delete(topic);
      if (earlier && error.number === UNREACHABLE) topics.set(topic, earlier);
      throw error;
    }
  }

  async _leave(op, topic) {
    this._topics[op].delete(topic);
    await this._sendRetrying(opposite(op), topic, () => !this._topics[op].has(topic));
  }

  /** Send a request. After one of `retriedErrors`, retry until it succeeds or is no longer wanted. */
  async _sendRetrying(op, topic, isWanted, retriedErrors = [ABORTED]) {
    for (let attempts = 0; ; attempts++) {
      try {
        return await this._request(op, { topic });
      } catch (error) {
        if (!retriedErrors.includes(error.number)) throw error;
        await new Promise((resolve) => setTimeout(resolve, delay(attempts)));
        if (!isWanted()) throw error;
      }
    }
  }

  /** Report that a topic could not be joined again after a reconnect. */
  _reportRefusal(op, topic, { number }) {
    if (number === UNREACHABLE) return;
    const event = { Type: "Sys", Evt: opposite(op), Ident: this.ident, Topic: topic };
    this._onEvent({ ...event, Err: String(number) });
  }

  /** Join a topic again, because the relay's own attempt failed temporarily; then report a join. */
  async _joinAgain(op, topic) {
    const topics = this._topics[op];
    const key = `${op} ${topic}`;
    const value = topics.get(topic);
    if (this._retrying.has(key)) return;
    this._retrying.add(key);
    try {
      await this._sendRetrying(op, topic, () => topics.get(topic) === value, TEMPORARY);
    } catch (error) {
      if (!this._isEnded && !TEMPORARY.includes(error.number)) this._reportRefusal(op, topic, error);
      return;
    } finally {
      this._retrying.delete(key);
    }
    this._options.onevent?.({ Type: "Sys", Evt: op, Ident: this.ident, Topic: topic });
  }

  // Incoming frames

  _onFrame(frame) {
    if ("ref" in frame) return this._onAnswer(frame);
    if (frame.Type === "Sys") return this._onEvent(frame);
    const message = this._toMessage(frame);
    const call = frame.Type === "Return" && this._calls.get(frame.Token);
    const listener = frame.Type === "Topic" && this._topics.topic_listen.get(message.to);
    if (call) this._onReturn(call, message);
    else if (frame.Type === "Rpc" && this._oncall) this._answerCall(message);
    else (listener || this._options.onmessage)?.(message);
  }

  _onAnswer({ ref, ...answer }) {
    const { resolve, reject } = this._requests.get(ref);
    this._requests.delete(ref);
    if (answer.Err === "0") resolve(answer);
    else reject(new MessagesError(Number(answer.Err), answer.Errstr));
  }

  _onEvent(event) {
    const { Evt: name, Ident: ident, Topic: topic } = event;
    const isOwn = ident === this.ident;
    const isTemporary = TEMPORARY.includes(Number(event.Err));
    // The relay has reconnected, but could not register this node again: reconnect too.
    if (isOwn && name === "disconnect" && isTemporary) return this._socket.close();
    if (isOwn && name === "disconnect") {
      this._end("denied", new MessagesError(null, "the node was disconnected"));
      this._socket.close(1000);
    } else if (isOwn && name.includes("_un")) {
      const op = name.replace("_un", "_");
      if (isTemporary && this._topics[op]?.has(topic)) this._joinAgain(op, topic);
      else this._topics[op]?.delete(topic);
    } else if (name === "disconnect" || name === "crash") {
      const error = new MessagesError(null, `${ident} disconnected or crashed`);
      for (const call of this._calls.values()) if (call.node === ident) call.reject(error);
    }
    this._options.onevent?.(event);
  }

  _onReturn(call, { body, error }) {
    if (!error) call.resolve(body);
    else if (error.number !== ABORTED) call.reject(error);
    else call.reject(new MessagesError(ABORTED, body || error.message));
  }

  _toMessage(frame) {
    const { Type: type, From: from, To: to, Token: token, Err: number = "0" } = frame;
    const message = { type, from, to, token, header: frame };
    if (number !== "0") message.error = new MessagesError(Number(number), frame.Errstr);
    try {
      message.body = decode(frame.Body, frame.Enc);
    } catch (error) {
      message.error = new MessagesError(null, `the body is not ${frame.Enc}: ${error.message}`);
    }
    message.reply = (body) => this._request("return", { node: from, token, ...encode(body) });
    return message;
  }

  _answerCall(message) {
    const { from: node, token } = message;
    const fail = (error) => {
      // Log the error here; the caller only receives its name.
      const isForCaller = error instanceof MessagesError;
      if (!isForCaller) console.error(error);
      const reason = isForCaller ? error.message : String(error?.name);
      return this._request("return_error", { node, token, reason });
    };
    const answer = (async () => this._oncall(message))().then(message.reply, fail);
    answer.catch((error) => this._isEnded || console.warn(`not answered: ${error.message}`));
  }
}

/** The delay before the next attempt in milliseconds, randomized so that pages do not retry together. */
function delay(attempts) {
  return Math.min(MAX_DELAY_MS, MIN_DELAY_MS * 2 ** Math.min(attempts, 10)) * (0.5 + Math.random() / 2);
}

/** Return the opposite operation: "topic_unlisten" for "topic_listen". */
function opposite(op) {
  return op.replace("_", "_un");
}

function deferred() {
  const result = {};
  result.promise = new Promise((resolve, reject) => Object.assign(result, { resolve, reject }));
  // A rejection that nothing awaits is not an error.
  result.promise.catch(() => {});
  return result;
}

function encode(value) {
  if (typeof value === "string") return { body: value };
  if (!(value instanceof Uint8Array)) return { body: JSON.stringify(value ?? null), enc: "json" };
  return { body: btoa(Array.from(value, (byte) => String.fromCharCode(byte)).join("")), enc: "b64" };
}

function decode(text, enc) {
  if (text === undefined || enc === undefined) return text;
  if (enc === "json") return JSON.parse(text);
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}
