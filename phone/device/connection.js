// @ts-check
/** A connection to the broker through the gateway, which is opened again when it ends. */

import mqtt from "../vendor/mqtt.esm.js";

import { reconnectDelayS } from "./delays.js";

/** @typedef {{topic: string, payload: Uint8Array, retain: boolean}} Outgoing */
/**
 * @typedef {{type: "connected", maxPacketBytes: number | null} | {type: "disconnected", code: number, reason: string}
 *   | {type: "received", topic: string, payload: Uint8Array, isRetained: boolean}} ConnectionEvent
 */
/** @typedef {import("../vendor/mqtt.esm.js").Client} Client */

const KEEPALIVE_S = 30;
const TIMEOUT_S = 15;
/** A broker sends no larger packet; a frame with its topic is smaller. */
const MAX_PACKET_BYTES = 2 ** 18;
/** A connection of this length was useful: the delays start again. */
const USEFUL_S = 30;

export class Connection {
  /** @type {Client | null} */
  #client = null;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  #failures = 0;
  #isOpen = false;
  #isStopped = true;
  /** The version of MQTT that the broker speaks; 0 before the first answer. @type {0 | 4 | 5} */
  #version = 0;

  /**
   * @param {object} options
   * @param {() => Promise<string>} options.url of the gateway, good for one connection
   * @param {string} options.clientId
   * @param {string[]} options.topics
   * @param {() => Promise<Outgoing>} options.will
   * @param {(event: ConnectionEvent) => void} options.onEvent
   */
  constructor(options) {
    this.options = options;
  }

  start() {
    if (!this.#isStopped) return;
    this.#isStopped = false;
    this.#open();
  }

  /** Connect at once, if a delay is running. */
  wake() {
    if (this.#isStopped || this.#client) return;
    clearTimeout(this.#timer);
    this.#failures = 0;
    this.#open();
  }

  /** End without a word, so that the broker publishes the will. */
  abandon() {
    const client = this.#client;
    this.#isStopped = true;
    clearTimeout(this.#timer);
    this.#ended({ code: 0, reason: "" });
    client?.end(true);
  }

  /** Publish a last message, and disconnect. @param {Outgoing} last */
  async stop(last) {
    this.#isStopped = true;
    clearTimeout(this.#timer);
    const client = this.#client;
    if (!client) return;
    const timeout = new Promise((resolve) => setTimeout(resolve, 2000));
    if (this.#isOpen) await Promise.race([this.publish(last), timeout]);
    await Promise.race([new Promise((resolve) => client.end(false, () => resolve(null))), timeout]);
  }

  /**
   * Publish at QoS 1; lost if there is no connection or it ends first.
   * @param {Outgoing} outgoing
   * @returns {Promise<boolean>} true once the broker has answered on this connection
   */
  publish({ topic, payload, retain }) {
    const client = this.#client;
    if (!client || !this.#isOpen) return Promise.resolve(false);
    return new Promise((resolve) => client.publish(topic, payload, { qos: 1, retain }, () => resolve(client === this.#client && this.#isOpen)));
  }

  async #open() {
    const { clientId, topics, url, will } = this.options;
    let address;
    try {
      address = await url();
    } catch (error) {
      this.#ended({ code: 0, reason: String(error) });
      return;
    }
    if (this.#isStopped) return;
    // amqtt does not understand a will or properties of MQTT 5, and waits for the rest: the version is found out without.
    const isProbe = this.#version === 0;
    const last = isProbe ? null : await will();
    const startS = performance.now() / 1000;
    let closed = { code: 0, reason: "" };
    let isAnswered = false;
    const client = mqtt.connect(address, {
      protocolVersion: this.#version || 5, clientId, clean: true, keepalive: KEEPALIVE_S, connectTimeout: TIMEOUT_S * 1000,
      reconnectPeriod: 0, queueQoSZero: false, resubscribe: false, timerVariant: "native",
      ...(last && { will: { topic: last.topic, payload: last.payload, qos: 1, retain: last.retain } }),
      ...(this.#version === 5 && { properties: { maximumPacketSize: MAX_PACKET_BYTES } }),
      createWebsocket(target, protocols) {
        const socket = new WebSocket(target, protocols);
        socket.addEventListener("close", ({ code, reason }) => (closed = { code, reason }));
        return socket;
      },
    });
    this.#client = client;
    client.on("error", (error) => (closed.reason ||= error.message));
    client.on("connect", ({ properties }) => {
      isAnswered = true;
      if (isProbe) {
        this.#version = 5;
        client.end(true);
        return;
      }
      client.subscribe(topics, { qos: 1 }, (error) => {
        if (error || client !== this.#client) return void client.end(true);
        this.#isOpen = true;
        this.options.onEvent({ type: "connected", maxPacketBytes: properties?.maximumPacketSize ?? null });
      });
    });
    client.on("message", (topic, payload, { retain }) => {
      if (topics.includes(topic)) this.options.onEvent({ type: "received", topic, payload, isRetained: Boolean(retain) });
    });
    client.on("close", () => {
      if (client !== this.#client) return;
      // The socket's own event, with the gateway's reason, may follow.
      setTimeout(() => this.#closed(client, { ...closed, isAnswered, isProbe, startS }), 0);
    });
  }

  /** @param {Client} client @param {{code: number, reason: string, isAnswered: boolean, isProbe: boolean, startS: number}} how */
  #closed(client, { code, reason, isAnswered, isProbe, startS }) {
    if (client !== this.#client) return;
    this.#client = null;
    if (isProbe && isAnswered && !this.#isStopped) return void this.#open();
    if (!isAnswered && code < 4400) {
      // Perhaps it does not speak this version: the other one is next, at once after the first try.
      this.#version = isProbe ? 4 : 0;
      if (isProbe && !this.#isStopped) return void this.#open();
    }
    if (isAnswered && performance.now() / 1000 - startS > USEFUL_S) this.#failures = 0;
    this.#ended({ code, reason });
  }

  /** @param {{code: number, reason: string}} how */
  #ended(how) {
    this.#client = null;
    this.#isOpen = false;
    this.options.onEvent({ type: "disconnected", ...how });
    if (this.#isStopped) return;
    this.#timer = setTimeout(() => this.#open(), reconnectDelayS(this.#failures, Math.random()) * 1000);
    this.#failures += 1;
  }
}
