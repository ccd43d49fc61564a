// @ts-check
/** The device's presence on its own topic, signed with its key. */

import { decodeMessage, encodeMessage } from "../wire/messages.js";
import { RefusedMessage } from "../wire/msgpack.js";
import { publishesAfterForeign, receiveOwnKey } from "../wire/presence.js";
import { presenceBytes, sign, verifyPresence } from "../wire/signatures.js";

/** @typedef {import("./membership.js").Key} Key */
/** @typedef {import("./connection.js").Outgoing} Outgoing */
/** @typedef {"none" | "publish" | "replaced"} Reaction */

const MAX_PRESENCE_BYTES = 1024;

export class OwnPresence {
  /** Another device that is online under this name with another key. */
  isContested = false;

  /**
   * @param {string} topic
   * @param {Key} key
   * @param {import("../wire/types.js").Integer} epoch higher than ever before
   */
  constructor(topic, key, epoch) {
    this.topic = topic;
    this.key = key;
    /** @type {import("../wire/presence.js").Own} */
    this.own = { epoch, instance: crypto.getRandomValues(new Uint8Array(16)), isBack: false };
  }

  /** @param {"online" | "stopped" | "offline" | "replaced"} state @returns {Promise<Outgoing>} */
  async message(state) {
    const { epoch, instance } = this.own;
    const fields = { state, epoch, instance, address: "" };
    const signature = await sign(this.key.privateKey, presenceBytes(this.topic, fields));
    return { topic: this.topic, payload: encodeMessage("presence", { ...fields, key: this.key.publicKey, signature }), retain: true };
  }

  /** Take what arrived on the own topic. @param {Uint8Array} payload @returns {Promise<Reaction>} */
  async receive(payload) {
    let presence;
    try {
      if (payload.length > MAX_PRESENCE_BYTES) return "publish";
      presence = decodeMessage("presence", payload);
    } catch (error) {
      if (error instanceof RefusedMessage) return "publish"; // cleared, or other bytes
      throw error;
    }
    if (!(await verifyPresence(this.topic, presence, this.key.publicKey))) {
      this.isContested = presence.state === "online";
      return publishesAfterForeign(this.own, presence) ? "publish" : "none";
    }
    const { own, reaction } = receiveOwnKey(this.own, presence);
    this.own = own;
    if (reaction === "stay_out") return "replaced";
    return reaction === "none" ? "none" : "publish";
  }
}
