// @ts-check
/** Received messages: verified, decoded, and translated into events of the state machine. */

import { canaryRank } from "../core/canary.js";
import { decodeMessage } from "../wire/messages.js";
import { RefusedMessage } from "../wire/msgpack.js";
import { hex, sha256 } from "../wire/signatures.js";
import { fleetTopics, deviceTopics } from "../wire/topics.js";
import { isExpired, receiveManifest } from "../wire/trust.js";
import { Store } from "./store.js";

/** @typedef {import("./machine.js").Event} Event */
/** @typedef {import("../wire/trust.js").Trust} Trust */
/** @typedef {import("../wire/trust.js").Channel} Channel */

const MAX_PRESENCE_BYTES = 1024;

export class Inbox {
  /** Refused messages by reason. @type {Record<string, number>} */
  refused = {};
  /** True while the aggregator is online, as it says itself; null before it has said so. @type {boolean | null} */
  isAggregatorOnline = null;
  #aggregatorStart = "";
  /** The time of the newest manifest, and when it was received on the clock that only grows. */
  #floor;

  /**
   * @param {Store} store
   * @param {{fleet: string, device: string}} membership
   * @param {Trust} trust
   */
  constructor(store, { fleet, device }, trust) {
    this.store = store;
    this.fleet = fleet;
    this.device = device;
    this.trust = trust;
    this.topics = { ...fleetTopics(fleet), own: deviceTopics(fleet, device) };
    this.#floor = { issuedS: Number(trust.issued_s), sinceS: performance.now() / 1000 };
  }

  /** Channels whose newest manifest has expired. @returns {Set<string>} */
  expired() {
    const { issuedS, sinceS } = this.#floor;
    const nowS = Math.floor(Math.max(Date.now() / 1000, issuedS + performance.now() / 1000 - sinceS));
    return new Set(Object.entries(this.trust.expires_s).filter(([, endS]) => isExpired(endS, nowS)).map(([channel]) => channel));
  }

  /**
   * Return the event of a message; null if it is refused or nothing follows from it.
   * @param {string} topic
   * @param {Uint8Array} payload
   * @param {boolean} isRetained
   * @returns {Promise<Event | null>}
   */
  async receive(topic, payload, isRetained) {
    const { topics } = this;
    try {
      if (topic === topics.own.blk && !isRetained) return { type: "frame", frame: decodeMessage("frame", payload) };
      if (topic === topics.own.ack && !isRetained) return this.#answer(payload);
      if (topic === topics.state) return this.#aggregator(payload, isRetained);
      const channel = /** @type {const} */ (["task", "round", "head"]).find((each) => topics[each] === topic);
      return channel && payload.length ? await this.#manifest(channel, payload) : null;
    } catch (error) {
      if (!(error instanceof RefusedMessage)) throw error;
      this.#refuse(error.reason);
      return null;
    }
  }

  /** The task as it was stored; null if another version of this page has stored it otherwise. @returns {Promise<Event | null>} */
  async recall() {
    const body = await this.store.fact("task");
    if (!body) return null;
    try {
      return { type: "task", digest: hex(await sha256(body)), manifest: decodeMessage("task", body) };
    } catch (error) {
      if (error instanceof RefusedMessage) return null;
      throw error;
    }
  }

  /** True if the task was signed again, since the last call. */
  wasRenewed = false;

  /** @param {string} reason */
  #refuse(reason) {
    this.refused = { ...this.refused, [reason]: (this.refused[reason] ?? 0) + 1 };
  }

  /** @param {Uint8Array} payload @returns {Event | null} */
  #answer(payload) {
    // A record of privacy is for tasks that this device does not follow.
    return { type: "receipt", receipt: decodeMessage("receipt", payload) };
  }

  /** @param {Uint8Array} payload @param {boolean} isRetained @returns {Event | null} */
  #aggregator(payload, isRetained) {
    if (payload.length > MAX_PRESENCE_BYTES) throw new RefusedMessage("malformed", "too many bytes");
    const { state, instance, epoch } = decodeMessage("presence", payload);
    this.isAggregatorOnline = state === "online";
    if (!this.isAggregatorOnline) return null;
    const start = hex(instance) || String(epoch);
    const isNew = start !== this.#aggregatorStart;
    this.#aggregatorStart = start;
    if (isNew) return { type: "aggregatorStarted" };
    return isRetained ? null : { type: "aggregatorReconnected" };
  }

  /** @param {Channel} channel @param {Uint8Array} payload @returns {Promise<Event | null>} */
  async #manifest(channel, payload) {
    const before = this.trust;
    const { trust, refused, body } = await receiveManifest(before, this.fleet, channel, payload);
    const isNew = trust.seen[channel]?.release !== before.seen[channel]?.release || trust.key !== before.key;
    // Decoded before it is stored, so that a task is stored that can be read.
    const task = channel === "task" && body ? decodeMessage("task", body) : null;
    if (trust !== before) {
      await this.store.setFacts({ trust, ...(task && body && { task: body }) });
      this.trust = trust;
      if (trust.issued_s !== before.issued_s) this.#floor = { issuedS: Number(trust.issued_s), sinceS: performance.now() / 1000 };
    }
    if (refused) this.#refuse(refused);
    if (!body) return null;
    if (task) {
      this.wasRenewed ||= isNew;
      return { type: "task", digest: hex(await sha256(body)), manifest: task };
    }
    if (channel !== "head") return null;
    const manifest = decodeMessage("head", body);
    const { candidate, canary_rank_limit: limit } = manifest;
    return { type: "head", manifest, isCanary: candidate !== null && (await canaryRank(this.device, candidate.version)) < limit };
  }
}
