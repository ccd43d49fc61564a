/** The files of `protocol/vectors`. */

import { webcrypto } from "node:crypto";
import { readFileSync } from "node:fs";

globalThis.crypto ??= webcrypto; // node 18 has no global one

/** @param {any} value JSON @returns {any} with bytes and large integers */
function revived(value) {
  if (Array.isArray(value)) return value.map(revived);
  if (value === null || typeof value !== "object") return value;
  const keys = Object.keys(value);
  if (keys.length === 1 && keys[0] === "hex") return unhex(value.hex);
  if (keys.length === 1 && keys[0] === "integer") return BigInt(value.integer);
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, revived(each)]));
}

/** @param {string} name */
export const vectors = (name) =>
  revived(JSON.parse(readFileSync(new URL(`../../protocol/vectors/${name}.json`, import.meta.url), "utf-8")));

/** @param {string} text @returns {Uint8Array} */
export const unhex = (text) => new Uint8Array(Buffer.from(text, "hex"));

/** @param {string} text @returns {Uint8Array} */
export const unbase64 = (text) => new Uint8Array(Buffer.from(text, "base64"));

/** Without fields that are undefined, which are absent. @param {any} value @returns {any} */
export function present(value) {
  if (Array.isArray(value)) return value.map(present);
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  return Object.fromEntries(Object.entries(value).filter(([, each]) => each !== undefined).map(([name, each]) => [name, present(each)]));
}
