// @ts-check
/** Joining, on the vectors: links, requests and answers. */

import assert from "node:assert/strict";
import test from "node:test";

import { enroll, JoinError, readLink } from "../device/membership.js";
import { hex } from "../wire/signatures.js";
import { unhex, vectors } from "./vectors.js";

const { links, requests, answers } = vectors("joining");
const [request] = requests;
const link = { ...readLink(links[0].link), secret: unhex(request.secret) };
const key = { privateKey: /** @type {any} */ (null), publicKey: unhex(request.key) };

/** Enroll a device by a server with one answer. @param {string} body @param {number} [status] */
async function enrolled(body, status = 200) {
  /** @type {any} */
  let sent;
  const fetch = globalThis.fetch;
  globalThis.fetch = async (_, options) => ((sent = JSON.parse(String(options?.body))), new Response(body, { status }));
  try {
    return { result: await enroll(link, request.device, key), sent };
  } catch (error) {
    return { sent, error: /** @type {JoinError} */ (error) };
  } finally {
    globalThis.fetch = fetch;
  }
}

for (const { link: text, fields } of links) {
  test(`link ${text}`, () => {
    if (!fields) return void assert.throws(() => readLink(text), { key: "link" });
    const found = readLink(text);
    assert.deepEqual(
      { address: found.address, fleet: found.fleet, key: found.key, name: found.name, secret: found.secret ? hex(found.secret) : "" },
      { address: fields.address, fleet: fields.fleet, key: fields.key, name: fields.name, secret: fields.secret },
    );
  });
}

for (const [number, { body, valid }] of answers.entries()) {
  test(`answer ${number}`, async () => {
    const { sent, result, error } = await enrolled(body);
    const { secret, aggregator_key, tls_key, ...expected } = request;
    assert.deepEqual(sent, expected);
    assert.equal(result !== undefined, valid);
    assert.equal(error?.key, valid ? undefined : "answer");
  });
}

test("a refusal has a sentence and a reason", async () => {
  const { error } = await enrolled(JSON.stringify({ error: "this link is damaged", reason: "link_damaged" }), 409);
  assert.deepEqual([error?.key, error?.message, error?.reason], ["refused", "this link is damaged", "link_damaged"]);
});
