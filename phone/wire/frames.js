// @ts-check
/** Transfers: payloads cut into frames, and joined from them. */

import { encodeMessage, MAX_CHUNK_BYTES } from "./messages.js";
import { RefusedMessage } from "./msgpack.js";
import { sameBytes, sha256 } from "./signatures.js";

/** @typedef {[number, number]} Range [start, stop) */
/** @typedef {import("./messages.js").Message<"frame">} Frame */

export const QUERY_BYTES = 256;
export const MAX_FRAMES = 8;
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

/** A payload that is joined from frames, in any order. The caller checks its size before. */
export class Reassembly {
  /** @param {Uint8Array} digest @param {number} sizeBytes */
  constructor(digest, sizeBytes) {
    this.digest = digest;
    this.payload = new Uint8Array(sizeBytes);
    /** @type {Range[]} gapless stretches that have arrived, ascending */
    this.stretches = [];
  }

  /** @returns {Range[]} */
  get missing() {
    /** @type {Range[]} */
    const ranges = [];
    let at = 0;
    for (const [start, stop] of this.stretches) {
      if (at < start) ranges.push([at, start]);
      at = stop;
    }
    if (at < this.payload.length) ranges.push([at, this.payload.length]);
    return ranges;
  }

  /**
   * Add a frame of this transfer: bytes that have arrived before stay.
   * @param {Pick<Frame, "size_bytes" | "offset" | "data">} frame
   * @returns {Promise<Uint8Array | null>} the payload, once it is whole and has the digest
   * @throws {RefusedMessage} `digest`: the transfer has ended
   */
  async add({ size_bytes, offset, data }) {
    const size = this.payload.length;
    const stop = offset + data.length;
    if (size_bytes !== size || stop > size || (!data.length && size)) throw new RefusedMessage("digest", "frames contradict each other");
    const gaps = this.missing;
    for (const [from, to] of gaps) {
      const start = Math.max(from, offset);
      const end = Math.min(to, stop);
      if (start < end) this.payload.set(data.subarray(start - offset, end - offset), start);
    }
    if (gaps.length) this.#join([offset, stop]);
    if (this.missing.length) return null;
    if (!sameBytes(await sha256(this.payload), this.digest)) throw new RefusedMessage("digest", "the sha256 is another");
    return this.payload;
  }

  /** @param {Range} added */
  #join([start, stop]) {
    const apart = this.stretches.filter(([from, to]) => to < start || from > stop);
    const touching = this.stretches.filter(([from, to]) => to >= start && from <= stop);
    /** @type {Range} */
    const joined = [Math.min(start, ...touching.map(([from]) => from)), Math.max(stop, ...touching.map(([, to]) => to))];
    this.stretches = [...apart, joined].sort((a, b) => a[0] - b[0]);
  }
}
