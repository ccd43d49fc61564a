// @ts-check
/** Tests of the page's texts and links; what needs a browser is tested in one. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { ALL } from "../page/texts.js";

const placeholders = (/** @type {unknown} */ text) => [...JSON.stringify(text).matchAll(/\{(\w+)\}/g)].map(([, name]) => name).sort();

test("each text is in both languages, with the same values", () => {
  assert.deepEqual(Object.keys(ALL.de), Object.keys(ALL.en));
  for (const [key, text] of Object.entries(ALL.en)) {
    assert.deepEqual(placeholders(ALL.de[key]), placeholders(text), key);
    assert.equal(typeof ALL.de[key], typeof text, key);
  }
});
