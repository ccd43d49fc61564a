// @ts-check
/** Devices that try a candidate head first. */

import { sha256 } from "../wire/signatures.js";

/**
 * Return the rank of a device for a version of the head, from 0 to 2^32 - 1: canaries have a rank below the manifest's limit.
 * @param {string} device
 * @param {number | bigint} version
 */
export async function canaryRank(device, version) {
  const digest = await sha256(new TextEncoder().encode(`${version}/${device}`));
  return new DataView(digest.buffer).getUint32(0);
}
