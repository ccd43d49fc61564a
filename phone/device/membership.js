// @ts-check
/** A device joins a fleet by a link, and proves its key at each connection. */

import { hex, sha256, sign, verify } from "../wire/signatures.js";

/** @typedef {import("./store.js").Membership} Membership */
/** @typedef {{privateKey: CryptoKey, publicKey: Uint8Array}} Key */
/**
 * @typedef {object} Link
 * @property {string} address of the aggregator's pages, such as `https://fleet.example`
 * @property {string} fleet
 * @property {string} key of the aggregator, 64 hex digits
 * @property {string} name proposed for the device; empty if there is none
 * @property {Uint8Array | null} secret good once; null in an open fleet
 */
/** @typedef {{key: Uint8Array, number: number, root: Uint8Array | null}} AggregatorKey */

const NAME = /^[A-Za-z0-9_-]{1,64}$/;
const KEY = /^[0-9a-f]{64}$/;
const encoder = new TextEncoder();

/** Why a device cannot join, by a word: the page has a sentence for each. */
export class JoinError extends Error {
  /**
   * @param {"link" | "name" | "offline" | "refused" | "answer"} key
   * @param {string} [detail] one sentence of the aggregator
   * @param {string} [reason] why the aggregator has refused, by a word of docs/protocol.md; empty for others
   */
  constructor(key, detail = "", reason = "") {
    super(detail || key);
    this.key = key;
    this.reason = reason;
  }
}

/** @param {string} text 64 hex digits, or another even number */
export const unhex = (text) => Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));

/** @param {string} text base64url without padding */
const unbase64 = (text) => Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (each) => each.charCodeAt(0));

/**
 * Read a link to join.
 * @param {string} text
 * @returns {Link}
 * @throws {JoinError}
 */
export function readLink(text) {
  let url, secret;
  try {
    url = new URL(text);
    const fields = new URLSearchParams(url.hash.slice(1));
    secret = fields.has("secret") ? unbase64(String(fields.get("secret"))) : null;
    const [fleet, key, name] = ["fleet", "key", "name"].map((each) => fields.get(each) ?? "");
    const path = /^(.*)\/join\/?$/.exec(url.pathname);
    const isValid = NAME.test(fleet) && KEY.test(key) && (!name || NAME.test(name)) && (!secret || secret.length === 16);
    if (path && isValid && ["https:", "http:"].includes(url.protocol)) return { address: url.origin + path[1], fleet, key, name, secret };
  } catch {
    // Not a URL, or no base64.
  }
  throw new JoinError("link");
}

/** Make a key that cannot leave the browser. @returns {Promise<Key>} */
export async function makeKey() {
  const pair = /** @type {CryptoKeyPair} */ (await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"]));
  return { privateKey: pair.privateKey, publicKey: new Uint8Array(await crypto.subtle.exportKey("raw", pair.publicKey)) };
}

/** @param {Uint8Array} secret @param {string} text */
async function proofOf(secret, text) {
  const key = await crypto.subtle.importKey("raw", /** @type {BufferSource} */ (secret), { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  return new Uint8Array(await crypto.subtle.sign("HMAC", key, encoder.encode(text)));
}

/** @param {string} url @param {RequestInit} [options] @returns {Promise<any>} JSON */
async function fetched(url, options) {
  let answer, body;
  try {
    answer = await fetch(url, { ...options, cache: "no-store", credentials: "omit" });
    body = await answer.json();
  } catch {
    throw new JoinError(answer ? "answer" : "offline");
  }
  if (!answer.ok) {
    const [sentence, reason] = [body?.error, body?.reason].map((each) => (typeof each === "string" ? each.slice(0, 300) : ""));
    throw new JoinError("refused", sentence, reason);
  }
  return body;
}

/**
 * Enroll a device in a closed fleet.
 * @param {Link & {secret: Uint8Array}} link
 * @param {string} device
 * @param {Key} key
 * @returns {Promise<AggregatorKey>}
 * @throws {JoinError}
 */
export async function enroll({ address, fleet, key: aggregator, secret }, device, { publicKey }) {
  const own = hex(publicKey);
  const proof = await proofOf(secret, `protofleet 1 join ${fleet} ${device} phone ${own}  ${aggregator}`);
  const id = hex((await sha256(secret)).subarray(0, 8));
  const { answer, signature } = await fetched(`${address}/join/enroll`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ fleet, device, kind: "phone", key: own, id, proof: hex(proof) }),
  });
  const isSigned = typeof answer === "string" && /^[0-9a-f]{128}$/.test(signature)
    && (await verify(unhex(aggregator), unhex(signature), encoder.encode(`protofleet 1 joined\n${answer}`)));
  if (!isSigned) throw new JoinError("answer");
  const fields = JSON.parse(answer);
  const request = hex(await sha256(proof));
  const isOurs = fields.fleet === fleet && fields.device === device && fields.key === own && fields.request === request;
  const { aggregator_key_number: number, root_key: root } = fields;
  if (!isOurs || !Number.isSafeInteger(number) || number < 0 || !(root === "" || root === null || KEY.test(root))) throw new JoinError("answer");
  return { key: unhex(aggregator), number, root: root ? unhex(root) : null };
}

/**
 * Return the gateway's URL, which is good for one connection.
 * @param {Membership} membership
 * @param {Key} key
 */
export async function gatewayUrl({ address, fleet, device, isClosed }, key) {
  const fields = new URLSearchParams({ fleet, device });
  if (isClosed) {
    const { challenge } = await fetched(`${address}/join/challenge`);
    const signature = await sign(key.privateKey, encoder.encode(`protofleet 1 connect ${fleet} ${device} ${challenge}`));
    fields.set("challenge", String(challenge));
    fields.set("signature", hex(signature));
  }
  return `${address.replace(/^http/, "ws")}/join/mqtt?${fields}`;
}

/** @param {string} name @throws {JoinError} */
export function requireName(name) {
  if (!NAME.test(name)) throw new JoinError("name");
}
