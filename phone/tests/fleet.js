/** An aggregator and a network in memory, with loss, duplicates, delays and restarts, for the state machine. */

import { START, step } from "../device/machine.js";
import { hex } from "../wire/signatures.js";
import { digestOf, Reassembly } from "./reassembly.js";
import { unhex } from "./vectors.js";

/** @param {number} seed @returns {() => number} from 0 to 1 */
export function random(seed) {
  let state = seed + 1;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** @param {string} name @param {number} size */
export function payloadOf(name, size) {
  const payload = new Uint8Array(size).map((_, at) => (at * 31 + name.length + name.charCodeAt(name.length - 1)) % 251);
  return { payload, digest: digestOf(payload) };
}

export const itemOf = (kind, { payload, digest }, task, about = "") =>
  ({ digest, size_bytes: payload.length, kind, task, about, received: false });

export const refOf = ({ payload, digest }, name) => ({ digest: unhex(digest), size_bytes: payload.length, name });

/** A device and its aggregator. `faults` is the probability of each fault, 0 for none. */
export class Fleet {
  constructor({ seed, faults, blobs, payloads, build, install }) {
    Object.assign(this, { random: random(seed), faults, payloads, build, install });
    this.blobs = new Map(blobs.map((blob) => [blob.digest, blob.payload]));
    this.partial = new Map();
    this.transfers = new Map();
    this.accepted = new Map();
    this.state = START;
    this.nowS = 0;
    this.queue = []; // [time, function]
    this.trace = [];
    this.refuse = () => null;
  }

  chance(factor = 1) {
    return this.random() < this.faults * factor;
  }

  /** Deliver later, perhaps never or twice. */
  deliver(act) {
    for (let times = Number(!this.chance()) + Number(this.chance()); times > 0; times -= 1) this.later(act, this.chance(3) ? 20 * this.random() : 0.1);
  }

  later(act, delayS) {
    this.queue.push([this.nowS + delayS, this.queue.length, act]);
  }

  event(event) {
    const { state, actions } = step(this.state, event, this.nowS);
    this.state = state;
    actions.forEach((action) => {
      this.trace.push(action.type);
      this[action.type](action);
    });
  }

  /** Let time pass until `done` holds, or fail. */
  run(done, limitS = 20_000) {
    const endS = this.nowS + limitS;
    while (!done()) {
      if (this.nowS > endS) throw new Error(`not done: ${JSON.stringify({ ...this.state, task: null, head: null }).slice(0, 2000)}`);
      this.nowS += 0.5;
      if (this.chance(0.02)) this.event({ type: "disconnected" });
      if (!this.state.connected && !this.chance(5)) this.event({ type: "connected", maxPacketBytes: 1408 });
      if (this.chance(0.01)) this.restart();
      this.queue.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
      while (this.queue.length && this.queue[0][0] <= this.nowS) this.queue.shift()[2]();
      this.event({ type: "ticked" });
    }
  }

  /** The aggregator restarts, and forgets what is unfinished. */
  restart() {
    this.transfers.clear();
    this.deliver(() => this.event({ type: "aggregatorStarted" }));
  }

  // Actions.
  open({ blob }) {
    this.later(() => this.event({ type: "opened", digest: blob.digest, offset: this.partial.get(blob.digest)?.length ?? 0 }), 0.1);
  }

  request({ digest, offset, length }) {
    const payload = this.blobs.get(digest);
    this.deliver(() => {
      for (let at = offset; at < Math.min(offset + length, payload.length); at += 1000) {
        const data = payload.subarray(at, Math.min(at + 1000, offset + length));
        this.deliver(() => this.event({ type: "frame", frame: { digest: unhex(digest), size_bytes: payload.length, offset: at, data } }));
      }
    });
  }

  append({ blob, offset, parts, done }) {
    const before = this.partial.get(blob.digest) ?? new Uint8Array();
    if (before.length !== offset) throw new Error(`appended at ${offset} after ${before.length} bytes`);
    const after = Buffer.concat([before, ...parts]);
    this.partial.set(blob.digest, after);
    if (!done) return;
    const isValid = digestOf(after) === blob.digest;
    if (!isValid) this.partial.delete(blob.digest);
    this.later(() => this.event({ type: "finished", digest: blob.digest, isValid }), 0);
  }

  send({ item, ranges }) {
    if (ranges.length > 8) throw new Error("more than 8 frames");
    const payload = this.payloads.get(item.digest);
    for (const [start, stop] of ranges) this.deliver(() => this.arrive(item, start, payload.subarray(start, stop)));
    this.later(() => this.event({ type: "drained" }), 0.2);
  }

  arrive(item, offset, data) {
    const { digest, size_bytes } = item;
    const answer = (receipt) => this.deliver(() => this.event({
      type: "receipt", receipt: { digest: unhex(digest), missing: [], reason: null, detail: "", sequence: 0, ...receipt },
    }));
    if (!this.accepted.has(digest)) {
      const transfer = this.transfers.get(digest) ?? new Reassembly(digest, size_bytes);
      this.transfers.set(digest, transfer);
      transfer.add({ size_bytes, offset, data });
    }
    if (offset + data.length !== size_bytes) return;
    const missing = this.accepted.has(digest) ? [] : this.transfers.get(digest).missing.slice(0, 64);
    if (missing.length) return void answer({ status: "missing", missing });
    const reason = this.refuse(item);
    if (reason) {
      this.transfers.delete(digest);
      return void answer({ status: "refused", ...reason });
    }
    if (!this.accepted.has(digest)) this.accepted.set(digest, this.transfers.get(digest).payload);
    answer({ status: "received" });
  }

  received() {}

  hasAccepted(item) {
    return this.accepted.has(item.digest) && hex(this.accepted.get(item.digest)) === hex(this.payloads.get(item.digest));
  }
}
