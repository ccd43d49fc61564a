import assert from "node:assert/strict";
import { test } from "node:test";

import { canaryRank } from "../core/canary.js";
import { confidenceBin, noveltyBin } from "../core/confidence.js";
import { moreNeeded, newGroups, packed, usableGroups } from "../core/groups.js";
import { halfBytes } from "../core/numbers.js";
import { keptByFilter } from "../core/outlier_filter.js";
import { UnusableImage } from "../core/pixels.js";
import { preprocess } from "../core/preprocessing.js";
import { prototypeOf, quantize } from "../core/prototypes.js";
import { hex } from "../wire/signatures.js";
import { unbase64, vectors } from "./vectors.js";

const images = vectors("preprocessing");

for (const [at, { file, preprocessing, pixels }] of images.cases.entries()) {
  test(`preprocessing ${at}: ${file}, ${preprocessing.crop_mode}, ${preprocessing.interpolation}`, () => {
    const { rgb, width, height } = images.files.find(({ name }) => name === file);
    assert.deepEqual(preprocess({ data: unbase64(rgb), width, height }, preprocessing), unbase64(pixels));
  });
}

test("refused: more than 2^24 pixels after resizing", () => {
  const { file, preprocessing } = images.refused.find(({ name }) => name === "more than 2^24 pixels after resizing");
  const header = new DataView(unbase64(file).buffer, 16);
  const [width, height] = [header.getUint32(0), header.getUint32(4)];
  assert.throws(() => preprocess({ data: new Uint8Array(3 * width * height), width, height }, preprocessing), UnusableImage);
});

for (const { name, alpha, features, kept } of vectors("outlier_filter").cases) {
  test(`outlier filter: ${name}`, () => {
    assert.deepEqual(keptByFilter(features, alpha), kept);
  });
}

const prototypes = vectors("prototypes");

for (const { name, batch_size, min_images, steps } of prototypes.groups) {
  test(`groups: ${name}`, () => {
    const sizes = { batchSize: batch_size, minImages: min_images };
    const groups = [];
    const present = new Set();
    for (const { added, groups: expected, waiting, more_needed } of steps) {
      for (let each = 0; each < added; each += 1) present.add(`image ${present.size}`);
      const ungrouped = () => [...present].filter((image) => !groups.flat().includes(image));
      groups.push(...newGroups(ungrouped(), groups.length, sizes, (each) => [...each].reverse()));
      const left = ungrouped();
      assert.deepEqual(groups.map((group) => group.length).sort((a, b) => a - b), expected);
      assert.equal(left.length, waiting);
      assert.equal(left.length ? moreNeeded(left.length, groups.length, sizes) : 0, more_needed);
      assert.equal(new Set(groups.flat()).size, groups.flat().length);
    }
  });
}

test("groups: those with a missing image, and too small ones, are left out", () => {
  const groups = [["a", "b"], ["c", "d"], ["e"]];
  assert.deepEqual(usableGroups(groups, new Set(["a", "b", "c", "e"]), 2), [["a", "b"]]);
});

test("prototypes: whole groups", () => {
  for (const { groups, batch_size, prototypes: expected } of prototypes.packed) {
    const named = groups.map((size, number) => Array.from({ length: size }, (_, at) => `${number}-${at}`));
    const made = packed(named, batch_size);
    assert.deepEqual(made.map((each) => each.length), expected);
    assert.deepEqual(made.flat(), named.flat());
  }
});

for (const { name, features, numbers, prototypes: expected, counts } of prototypes.averages) {
  test(`prototypes: ${name}`, () => {
    counts.forEach((count, number) => {
      const own = features.filter((_, at) => numbers[at] === number);
      assert.equal(own.length, count);
      assert.deepEqual(prototypeOf(own.map((each) => Float32Array.from(each))), expected[number]);
    });
  });
}

for (const { name, values, prototypes: expected, range, range_bytes } of prototypes.quantized) {
  test(`quantization: ${name}`, () => {
    const quantized = quantize(values);
    assert.deepEqual([...quantized.steps], expected.flat());
    assert.deepEqual([quantized.low, quantized.high], range);
    assert.equal(hex(halfBytes([...quantized.low, ...quantized.high])), range_bytes);
  });
}

test("canary ranks", async () => {
  const { ranks, canary_rank_limit } = vectors("canary");
  for (const { device, version, rank, is_canary } of ranks) {
    assert.equal(await canaryRank(device, version), rank);
    assert.equal(rank < canary_rank_limit, is_canary);
  }
});

test("bins of confidence and novelty", () => {
  const { confidence, novelty } = vectors("confidence");
  for (const { probabilities, bin } of confidence) assert.equal(confidenceBin(probabilities), bin, String(probabilities));
  for (const { novelty: value, bin } of novelty) assert.equal(noveltyBin(value), bin, String(value));
});
