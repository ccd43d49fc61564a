import assert from "node:assert/strict";
import { test } from "node:test";

import { chunkBytes, cut, framesOf, queryRange } from "../wire/frames.js";
import { decodeMessage, encodeMessage } from "../wire/messages.js";
import { decode, encode, RefusedMessage } from "../wire/msgpack.js";
import { publishesAfterForeign, receiveOwnKey } from "../wire/presence.js";
import {
  certificateBytes, hex, presenceBytes, sha256, sign, transferBytes, verify, verifyManifest, verifyPresence,
} from "../wire/signatures.js";
import { deviceTopics, fleetTopics } from "../wire/topics.js";
import { isExpired, NO_TRUST, receiveManifest } from "../wire/trust.js";
import { Reassembly } from "./reassembly.js";
import { present, unhex, vectors } from "./vectors.js";

/** Between the aggregator and a second operator. */
const NOT_FOR_DEVICES = ["sum_request", "sum_reply"];

const { messages, tolerated, refused } = vectors("messages");

for (const [at, { type, bytes, fields }] of [...messages, ...tolerated].entries()) {
  test(`message ${at}, ${type}`, { skip: NOT_FOR_DEVICES.includes(type) }, () => {
    const decoded = decodeMessage(type, unhex(bytes));
    const expected = type === "frame" ? fields : without(fields, "v");
    assert.deepEqual(present(decoded), without(expected, "type"));
    assert.deepEqual(decodeMessage(type, encodeMessage(type, decoded)), decoded);
  });
}

const without = (fields, name) => Object.fromEntries(Object.entries(fields).filter(([each]) => each !== name));

for (const { name, type, bytes, reason } of refused) {
  test(`refused: ${name}`, () => {
    assert.throws(() => decodeMessage(type, unhex(bytes)), (error) => error instanceof RefusedMessage && error.reason === reason);
  });
}

test("a message that is too large is refused before it is decoded", () => {
  assert.throws(() => decodeMessage("receipt", new Uint8Array(122_881)), { reason: "malformed" });
});

test("small values at every place of the buffer are encoded and decoded", () => {
  for (let size = 0; size < 300; size += 1) {
    const values = [new Uint8Array(size), 7, -1, null, true, [1], new Map([["a", 2]]), "b"];
    assert.deepEqual(decode(encode(values)), values);
  }
});

test("topics", () => {
  const { fleet, fleet_topics, device_topics } = vectors("topics");
  assert.deepEqual(fleetTopics(fleet), fleet_topics);
  for (const { device, topics } of device_topics) assert.deepEqual(deviceTopics(fleet, device), topics);
});

const transfers = vectors("frames");
const payload = unhex(transfers.payload);

test("frames: their size", () => {
  for (const { max_packet_bytes, chunk_bytes } of transfers.chunk_bytes) assert.equal(chunkBytes(max_packet_bytes), chunk_bytes);
});

for (const { name, size_bytes, ranges, chunk_bytes, frames } of transfers.frames) {
  test(`frames: ${name}`, async () => {
    const data = payload.subarray(0, size_bytes);
    const digest = await sha256(data);
    const expected = frames.map((each) => decodeMessage("frame", unhex(each)));
    let signed = { key: new Uint8Array(), signature: new Uint8Array() };
    if (expected[0].key.length) {
      const bytes = transferBytes(transfers.fleet, transfers.device, digest, size_bytes);
      signed = { key: unhex(transfers.public_key), signature: await sign(await privateKey(transfers.private_key), bytes) };
    }
    const made = framesOf(data, { digest, ...signed }, chunk_bytes, ranges ?? undefined).map((each) => decodeMessage("frame", each));
    assert.deepEqual(made, expected);
    if (name === "a query") assert.deepEqual([queryRange(size_bytes, chunk_bytes)], ranges);
    if (name === "in one frame") assert.deepEqual(queryRange(size_bytes, chunk_bytes), [0, size_bytes]);
  });
}

test("frames: windows", () => {
  for (const { ranges, chunk_bytes, frames, window, rest } of transfers.windows) {
    assert.deepEqual(cut(ranges, chunk_bytes, frames), { window, rest });
  }
});

for (const { name, digest, frames } of transfers.reassemblies) {
  test(`reassembly: ${name}`, () => {
    const reassembly = new Reassembly(digest, frames[0].size_bytes);
    for (const { offset, data, size_bytes, missing, is_whole, refused: reason } of frames) {
      const add = () => reassembly.add({ size_bytes, offset, data: typeof data === "string" ? unhex(data) : payload.subarray(...data) });
      if (reason) assert.throws(add, { reason });
      else {
        assert.equal(add(), is_whole);
        assert.deepEqual(reassembly.missing, missing);
      }
    }
  });
}

/** @param {string} seed */
const privateKey = (seed) =>
  crypto.subtle.importKey("pkcs8", unhex(`302e020100300506032b657004220420${seed}`), "Ed25519", false, ["sign"]);

const signatures = vectors("signatures");

/** Ed25519 is deterministic: a valid signature is made again with the private key. */
async function isMadeAgain(key, signed, signature) {
  const { private_key } = signatures.keys.find((each) => each.public_key === key);
  assert.equal(hex(await sign(await privateKey(private_key), signed)), signature);
}

test("signatures: transfers", async () => {
  for (const { fleet, device, digest, size_bytes, key, signed, signature, valid } of signatures.transfers) {
    const data = transferBytes(fleet, device, unhex(digest), size_bytes);
    assert.equal(hex(data), signed);
    assert.equal(await verify(unhex(key), unhex(signature), data), valid);
    if (valid) await isMadeAgain(key, data, signature);
  }
});

test("signatures: presences", async () => {
  for (const { topic, bytes, key, signed, valid } of signatures.presences) {
    const presence = decodeMessage("presence", unhex(bytes));
    assert.equal(hex(presenceBytes(topic, presence)), signed);
    assert.equal(await verifyPresence(topic, presence, unhex(key)), valid);
    if (valid) await isMadeAgain(key, unhex(signed), hex(presence.signature));
  }
});

test("signatures: certificates", async () => {
  for (const { fleet, fields, signed, valid } of signatures.certificates) {
    assert.equal(hex(certificateBytes(fleet, fields)), signed);
    assert.equal(await verify(fields.signer, fields.signature, unhex(signed)), valid);
  }
});

for (const { name, fleet, channel, bytes, refused: reason } of signatures.manifests) {
  test(`signatures: a manifest, ${name}`, async () => {
    if (reason === "malformed") assert.throws(() => decodeMessage("signed", unhex(bytes)), { reason });
    else assert.equal(await verifyManifest(fleet, channel, decodeMessage("signed", unhex(bytes))), !reason);
  });
}

const trust = vectors("trust");

/** The trust in the form of the vectors. */
const plainTrust = ({ key, number, root, seen, expires_s, issued_s }) => ({
  key: key && hex(key), number, root: root && hex(root), expires_s, issued_s,
  seen: Object.fromEntries(Object.entries(seen).map(([channel, { release }]) => [channel, release])),
});

for (const { name, start, steps } of trust.sequences) {
  test(`trust: ${name}`, async () => {
    let now = start.key ? { ...start, key: unhex(start.key), root: start.root && unhex(start.root) } : NO_TRUST;
    assert.deepEqual(plainTrust(now), start);
    for (const { channel, bytes, refused: reason, trust: after } of steps) {
      const verdict = await receiveManifest(now, trust.fleet, channel, unhex(bytes));
      assert.equal(verdict.refused, reason);
      assert.equal(verdict.body === null, Boolean(reason));
      assert.deepEqual(plainTrust(verdict.trust), after);
      now = verdict.trust;
    }
  });
}

test("trust: expiry", () => {
  for (const { expires_s, now_s, expired } of trust.expiry) assert.equal(isExpired(expires_s, now_s), expired);
});

for (const { name, epoch, instance, steps } of vectors("presence").sequences) {
  test(`presence: ${name}`, () => {
    let own = { epoch, instance: unhex(instance), isBack: false };
    for (const step of steps) {
      const { own: after, reaction } = receiveOwnKey(own, { ...step, instance: unhex(step.instance) });
      assert.deepEqual([reaction, after.epoch], [step.reaction, step.epoch_after]);
      own = after;
    }
  });
}

test("presence: one with another key", () => {
  const own = { epoch: 7, instance: new Uint8Array(16), isBack: true };
  assert.equal(publishesAfterForeign(own, { state: "online", epoch: 7 }), false);
  assert.equal(publishesAfterForeign(own, { state: "online", epoch: 8 }), true);
  assert.equal(publishesAfterForeign(own, { state: "offline", epoch: 6 }), true);
});
