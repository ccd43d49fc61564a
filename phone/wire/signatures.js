// @ts-check
/** SHA-256, Ed25519, and the bytes that are signed. WebCrypto alone computes. */

/** @typedef {import("./types.js").Integer} Integer */
/** @typedef {import("./messages.js").Message<"signed">} Signed */
/** @typedef {import("./messages.js").Message<"presence">} Presence */
/** @typedef {Signed["certificates"][number]} KeyCertificate */

/** @param {Uint8Array} data lower-case */
export const hex = (data) => Array.from(data, (byte) => byte.toString(16).padStart(2, "0")).join("");

/** @param {Uint8Array} a @param {Uint8Array} b */
export const sameBytes = (a, b) => compareBytes(a, b) === 0;

/**
 * Compare bytes, the first ones first: negative, 0 or positive.
 * @param {Uint8Array} a
 * @param {Uint8Array} b
 */
export function compareBytes(a, b) {
  const at = a.findIndex((byte, each) => byte !== b[each]);
  return at < 0 || at >= b.length ? a.length - b.length : a[at] - b[at];
}

/** @param {Uint8Array} data @returns {Promise<Uint8Array>} 32 bytes */
export async function sha256(data) {
  return new Uint8Array(await crypto.subtle.digest("SHA-256", /** @type {BufferSource} */ (data)));
}

/** @param {...(string | Uint8Array)} parts */
function joined(...parts) {
  const encoder = new TextEncoder();
  const all = parts.map((part) => (typeof part === "string" ? encoder.encode(part) : part));
  const data = new Uint8Array(all.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of all) {
    data.set(part, at);
    at += part.length;
  }
  return data;
}

/** @param {string} fleet @param {string} channel @param {Signed} signed */
export const manifestBytes = (fleet, channel, { release, issued_s, expires_s, body }) =>
  joined(`protofleet 1 manifest ${fleet} ${channel} ${release} ${issued_s} ${expires_s}\n`, body);

/** @param {string} fleet @param {Pick<KeyCertificate, "number" | "key" | "root">} certificate */
export const certificateBytes = (fleet, { number, key, root }) =>
  joined(`protofleet 1 key ${fleet} ${number} ${hex(key)} ${hex(root)}`);

/** @param {string} topic @param {Omit<Presence, "key" | "signature">} presence */
export const presenceBytes = (topic, { state, epoch, instance, address }) =>
  joined(`protofleet 1 presence ${topic} ${state} ${epoch} ${hex(instance)} ${address}`);

/** @param {string} fleet @param {string} device @param {Uint8Array} digest @param {number} sizeBytes */
export const transferBytes = (fleet, device, digest, sizeBytes) =>
  joined(`protofleet 1 transfer ${fleet} ${device} ${sizeBytes}\n`, digest);

/** @param {CryptoKey} key @param {Uint8Array} data @returns {Promise<Uint8Array>} 64 bytes */
export async function sign(key, data) {
  return new Uint8Array(await crypto.subtle.sign("Ed25519", key, /** @type {BufferSource} */ (data)));
}

/**
 * Verify a signature; a key or signature of another length is invalid.
 * @param {Uint8Array} key
 * @param {Uint8Array} signature
 * @param {Uint8Array} data
 */
export async function verify(key, signature, data) {
  if (key.length !== 32 || signature.length !== 64) return false;
  try {
    const imported = await crypto.subtle.importKey("raw", /** @type {BufferSource} */ (key), "Ed25519", false, ["verify"]);
    return await crypto.subtle.verify("Ed25519", imported, /** @type {BufferSource} */ (signature), /** @type {BufferSource} */ (data));
  } catch (error) {
    // Some implementations refuse bytes that are no point of the curve.
    if (error instanceof DOMException) return false;
    throw error;
  }
}

/**
 * Return true if all signatures of a manifest are valid, those of its certificates as well.
 * @param {string} fleet
 * @param {string} channel
 * @param {Signed} signed
 */
export async function verifyManifest(fleet, channel, signed) {
  const verdicts = await Promise.all([
    verify(signed.key, signed.signature, manifestBytes(fleet, channel, signed)),
    ...signed.certificates.map((each) => verify(each.signer, each.signature, certificateBytes(fleet, each))),
  ]);
  return verdicts.every(Boolean);
}

/**
 * Return true if a presence is signed with this key.
 * @param {string} topic
 * @param {Presence} presence
 * @param {Uint8Array} key
 */
export async function verifyPresence(topic, presence, key) {
  return sameBytes(presence.key, key) && verify(key, presence.signature, presenceBytes(topic, presence));
}
