// @ts-check
/** The aggregator's key that a device trusts, and the releases that it has seen. */

import { decodeMessage } from "./messages.js";
import { RefusedMessage } from "./msgpack.js";
import { sameBytes, sha256, verifyManifest } from "./signatures.js";

/** @typedef {import("./types.js").Integer} Integer */
/** @typedef {import("./messages.js").Message<"signed">} Signed */
/** @typedef {"task" | "round" | "head"} Channel */
/**
 * @typedef {object} Seen
 * @property {Integer} release
 * @property {Uint8Array} body the sha256 of the body
 */
/**
 * @typedef {object} Trust
 * @property {Uint8Array | null} key null before the first manifest
 * @property {Integer} number of the certificate of `key`, or 0
 * @property {Uint8Array | null} root
 * @property {Partial<Record<Channel, Seen>>} seen the highest release of each channel
 * @property {Partial<Record<Channel, Integer>>} expires_s of each channel's manifest, also with another key since
 * @property {Integer} issued_s of the manifest that was accepted last, or 0
 */
/** @typedef {{trust: Trust, refused: string, body: Uint8Array | null}} Verdict `body` is null if it is refused */

/** @type {Trust} */
export const NO_TRUST = { key: null, number: 0, root: null, seen: {}, expires_s: {}, issued_s: 0 };

/**
 * Return the trust after a manifest, and the manifest's body or the reason why it is refused.
 * @param {Trust} trust
 * @param {string} fleet
 * @param {Channel} channel
 * @param {Uint8Array} payload
 * @returns {Promise<Verdict>}
 */
export async function receiveManifest(trust, fleet, channel, payload) {
  let signed;
  try {
    signed = decodeMessage("signed", payload);
  } catch (error) {
    if (error instanceof RefusedMessage) return { trust, refused: error.reason, body: null };
    throw error;
  }
  if (!(await verifyManifest(fleet, channel, signed))) return { trust, refused: "signature", body: null };
  const now = withCertificates(trust, signed);
  if (!now.key || !sameBytes(now.key, signed.key)) return { trust, refused: "signature", body: null };

  const body = await sha256(signed.body);
  const seen = now.seen[channel];
  if (seen && signed.release <= seen.release) {
    const isSame = signed.release === seen.release && sameBytes(body, seen.body);
    return isSame ? { trust: now, refused: "", body: signed.body } : { trust: now, refused: "replayed", body: null };
  }
  const { release, expires_s, issued_s } = signed;
  return {
    trust: {
      ...now,
      seen: { ...now.seen, [channel]: { release, body } },
      expires_s: { ...now.expires_s, [channel]: expires_s },
      issued_s,
    },
    refused: "",
    body: signed.body,
  };
}

/**
 * @param {Trust} trust
 * @param {Signed} signed
 * @returns {Trust}
 */
function withCertificates(trust, signed) {
  let { key, number, root, seen } = trust;
  const isFirst = key === null;
  const certificates = [...signed.certificates].sort((a, b) => (a.number < b.number ? -1 : Number(a.number > b.number)));
  for (const each of certificates) {
    const counts = isFirst ? sameBytes(each.key, signed.key) : key !== null && sameBytes(each.signer, root ?? key);
    if (!counts || each.number <= number) continue;
    if (key !== null && !sameBytes(key, each.key)) seen = {};
    ({ key, number } = each);
    if (each.root.length) root = each.root;
  }
  return { ...trust, key: key ?? signed.key, number, root, seen };
}

/**
 * Return true after the end of a manifest's validity.
 * @param {Integer} expiresS
 * @param {Integer} nowS the clock, or if that is behind, `issued_s` of the trust and the seconds since
 */
export const isExpired = (expiresS, nowS) => nowS > expiresS;
