// @ts-check
/** What a client does when it receives a presence on its own topic. */

import { compareBytes } from "./signatures.js";
import { integer } from "./msgpack.js";

/** @typedef {import("./types.js").Integer} Integer */
/** @typedef {import("./messages.js").Message<"presence">} Presence */
/**
 * @typedef {object} Own
 * @property {Integer} epoch
 * @property {Uint8Array} instance
 * @property {boolean} isBack the client has received a presence of its own instance
 */
/** @typedef {"none" | "publish" | "report" | "stay_out"} Reaction `report` is `publish`, and a warning of a duplicate */

const MAX_EPOCH = 2n ** 62n;

/**
 * Return the client after a presence that is signed with its own key, and its reaction.
 * @param {Own} own
 * @param {Pick<Presence, "state" | "epoch" | "instance">} presence
 * @returns {{own: Own, reaction: Reaction}}
 */
export function receiveOwnKey(own, { state, epoch, instance }) {
  if (epoch > MAX_EPOCH) return { own, reaction: "publish" };
  const order = compareBytes(instance, own.instance);
  if (order === 0) {
    const isOwn = state === "online" && epoch === own.epoch;
    return { own: { ...own, isBack: true }, reaction: isOwn ? "none" : "publish" };
  }
  const isLater = epoch > own.epoch || (epoch === own.epoch && order > 0);
  if (isLater && own.isBack) return { own, reaction: "stay_out" };
  if (isLater) return { own: { ...own, epoch: integer(BigInt(epoch) + 1n) }, reaction: "publish" };
  if (state === "replaced" || (own.isBack && state === "online")) return { own, reaction: "report" };
  return { own, reaction: own.isBack ? "publish" : "none" };
}

/**
 * Return true if a client publishes its presence again after one with another key or an invalid signature.
 * @param {Own} own
 * @param {Pick<Presence, "state" | "epoch">} presence
 */
export const publishesAfterForeign = (own, presence) => presence.state !== "online" || presence.epoch > own.epoch;
