// @ts-check
/** Bytes of transfers in the store: blobs that arrive, and frames that leave. */

import { framesOf } from "../wire/frames.js";
import { hex, sha256, sign, transferBytes } from "../wire/signatures.js";
import { unhex } from "./membership.js";

/** @typedef {import("./store.js").Store} Store */
/** @typedef {import("./machine.js").State} State */
/** @typedef {import("./work.js").OutboxRow} OutboxRow */

/**
 * Store the next parts of a blob.
 * @param {Store} store
 * @param {string} digest
 * @param {number} offset
 * @param {Uint8Array[]} parts one after the other
 */
export function keepParts(store, digest, offset, parts) {
  let at = offset;
  const rows = parts.map((data) => {
    const row = { digest, offset: at, data: data.slice() };
    at += data.length;
    return row;
  });
  return store.write({ parts: rows }, {}, "relaxed");
}

/** Keep a blob whose parts are whole, or drop them if its digest is another; return if it is valid. @param {Store} store @param {string} digest */
export async function verified(store, digest) {
  const blob = new Blob((await store.parts(digest)).map(({ data }) => /** @type {BlobPart} */ (data)));
  const isValid = hex(await sha256(new Uint8Array(await blob.arrayBuffer()))) === digest;
  await (isValid ? store.keepBlob(digest, blob) : store.dropParts(digest));
  return isValid;
}

/** Delete the blobs that neither the task nor a head in use names; return those that are left. @param {Store} store @param {State} state */
export async function dropUnused(store, { task, head }) {
  const heads = await store.fact("heads");
  const used = [heads?.installed, heads?.previous].flatMap((each) => (each ? [each.head, each.backbone] : []));
  const named = [...(task?.manifest.backbones ?? []), ...(head ? [head.manifest.current.head, head.manifest.candidate?.head] : [])];
  await store.dropOthers(new Set([...used, ...named.flatMap((ref) => (ref ? [hex(ref.digest)] : []))]));
  return new Set(await store.keys("blobs"));
}

/**
 * Note that a message leaves the phone, and return its signed frames.
 * @param {import("./session.js").Parts} parts
 * @param {OutboxRow} row
 * @param {import("../wire/frames.js").Range[]} ranges
 * @param {number} chunk
 */
export async function leavingFrames({ store, membership, key }, { digest, kind, payload, prototypes, images }, ranges, chunk) {
  if (!(await store.get("left", digest))) {
    await store.write({ left: [{ digest, kind, time_s: Math.floor(Date.now() / 1000), bytes: payload.length, prototypes, images }] });
  }
  const transfer = transferBytes(membership.fleet, membership.device, unhex(digest), payload.length);
  const signed = { digest: unhex(digest), key: key.publicKey, signature: await sign(key.privateKey, transfer) };
  return framesOf(payload, signed, chunk, ranges);
}
