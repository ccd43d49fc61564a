/** The receiving side of an upload, which the aggregator has and no phone. */

import { createHash } from "node:crypto";

import { RefusedMessage } from "../wire/msgpack.js";

export const digestOf = (data) => createHash("sha256").update(data).digest("hex");

/** A payload that is joined from frames, in any order. */
export class Reassembly {
  constructor(digest, sizeBytes) {
    this.digest = digest;
    this.payload = new Uint8Array(sizeBytes);
    this.has = new Array(sizeBytes).fill(false);
  }

  /** Ranges [start, stop) that have not arrived. */
  get missing() {
    const ranges = [];
    this.has.forEach((isThere, at) => {
      const last = ranges.at(-1);
      if (isThere) return;
      if (last?.[1] === at) last[1] = at + 1;
      else ranges.push([at, at + 1]);
    });
    return ranges;
  }

  /** Add a frame: bytes that have arrived before stay. Return true once the payload is whole and has the digest. */
  add({ size_bytes, offset, data }) {
    const size = this.payload.length;
    const stop = offset + data.length;
    if (size_bytes !== size || stop > size || (!data.length && size)) throw new RefusedMessage("digest", "frames contradict each other");
    data.forEach((byte, at) => {
      if (!this.has[offset + at]) this.payload[offset + at] = byte;
      this.has[offset + at] = true;
    });
    if (!this.has.every(Boolean)) return false;
    if (digestOf(this.payload) !== this.digest) throw new RefusedMessage("digest", "the sha256 is another");
    return true;
  }
}
