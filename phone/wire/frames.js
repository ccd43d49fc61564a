// @ts-check
/** Transfers: payloads cut into frames. */

import { encodeMessage, MAX_CHUNK_BYTES } from "./messages.js";

/** @typedef {[number, number]} Range [start, stop) */
/** @typedef {import("./messages.js").Message<"frame">} Frame */

const QUERY_BYTES = 256;
const MAX_FRAMES = 8;
const ENVELOPE_BYTES = 384;

/**
 * Return the most bytes of data in a frame.
 * @param {number | null} maxPacketBytes the broker's Maximum Packet Size, null without a limit
 */
export const chunkBytes = (maxPacketBytes) =>
  Math.min(MAX_CHUNK_BYTES, Math.max(QUERY_BYTES, (maxPacketBytes ?? Infinity) - ENVELOPE_BYTES));

/**
 * Return the range of a query: the last bytes, or all of a payload that fits one frame.
 * @param {number} sizeBytes
 * @param {number} chunk
 * @returns {Range}
 */
export const queryRange = (sizeBytes, chunk) => [sizeBytes <= chunk ? 0 : sizeBytes - QUERY_BYTES, sizeBytes];

/**
 * Cut the first frames out of ranges: return their ranges, and the ranges that remain.
 * @param {Range[]} ranges
 * @param {number} chunk
 * @param {number} [frames]
 * @returns {{window: Range[], rest: Range[]}}
 */
export function cut(ranges, chunk, frames = MAX_FRAMES) {
  /** @type {Range[]} */
  const window = [];
  /** @type {Range[]} */
  const rest = [];
  for (const [first, stop] of ranges) {
    let start = first;
    for (; start < stop && window.length < frames; start += chunk) window.push([start, Math.min(stop, start + chunk)]);
    if (start < stop) rest.push([start, stop]);
  }
  return { window, rest };
}

/**
 * Return the encoded frames of a payload, or of its ranges.
 * @param {Uint8Array} payload
 * @param {Pick<Frame, "digest" | "key" | "signature">} signed the same in all frames
 * @param {number} chunk
 * @param {Range[]} [ranges]
 * @returns {Uint8Array[]}
 */
export function framesOf(payload, signed, chunk, ranges = [[0, payload.length]]) {
  const size_bytes = payload.length;
  const clipped = ranges.map(([start, stop]) => /** @type {Range} */ ([start, Math.min(stop, size_bytes)]));
  const pieces = size_bytes ? cut(clipped, chunk, Infinity).window : [[0, 0]];
  return pieces.map(([offset, stop]) => encodeMessage("frame", { ...signed, size_bytes, offset, data: payload.subarray(offset, stop) }));
}
