import assert from "node:assert/strict";
import { test } from "node:test";

import { heldOut, heldOutCount } from "../core/holdout.js";
import { classReports, encodeSubmission, fingerprint, heldOutImages, NoSubmission, prepare } from "../device/submission.js";
import { encodeEvaluation, encodeRefusal } from "../device/evaluation.js";
import { decodeMessage } from "../wire/messages.js";
import { random } from "./fleet.js";
import { digestOf } from "./reassembly.js";

const SIZE = 6;
const task = (changes = {}) => ({ classes: ["ant", "bee", "wasp"], alpha: 1, batch_size: 5, min_images: 2, columns: undefined, ...changes });

/** A device's images with features, changed at random as a person does. */
class Images {
  constructor(seed) {
    this.random = random(seed);
    this.images = [];
    this.groups = [];
    this.features = new Map();
    this.added = 0;
  }

  add(label) {
    this.added += 1;
    const id = digestOf(`image ${this.added} ${this.random()}`);
    this.features.set(id, Float32Array.from({ length: SIZE }, () => this.random() - 0.5));
    this.images = [...this.images, { id, label, time_s: this.added, origin: "camera" }];
  }

  any() {
    return this.images[Math.floor(this.random() * this.images.length)];
  }

  change() {
    const choice = this.random();
    if (choice < 0.8 || !this.images.length) this.add(task().classes[Math.floor(this.random() * 3)]);
    else if (choice < 0.9) this.images = this.images.filter((each) => each !== this.any());
    else this.images = this.images.map((each) => (each === this.any() ? { ...each, label: "bee" } : each));
  }

  shuffled = (images) => [...images].sort((a, b) => (digestOf(a + this.added) < digestOf(b + this.added) ? -1 : 1));

  build(manifest) {
    const prepared = prepare(manifest, this.images, this.groups, this.features, this.shuffled);
    this.groups = [...this.groups, ...prepared.groups];
    return prepared;
  }
}

for (let seed = 0; seed < 20; seed += 1) {
  test(`an image is in one group for good, and whole groups alone are uploaded: ${seed}`, () => {
    const device = new Images(seed);
    for (let round = 0; round < 12; round += 1) {
      for (let change = 0; change < 15; change += 1) device.change();
      const manifest = task({ alpha: [1, 0.7][round % 2], batch_size: [5, 3, 8][seed % 3], min_images: [2, 4][(seed + round) % 2] });
      const { prototypes, labels, counts, omitted, images } = device.build(manifest);
      const grouped = device.groups.flatMap((group) => group.images);
      assert.equal(new Set(grouped).size, grouped.length);
      assert.equal(images, device.images.length);

      const held = heldOutImages(device.images, device.groups);
      assert.ok(grouped.every((image) => !held.has(image)));
      manifest.classes.forEach((label, at) => {
        const training = new Set(device.images.filter((each) => each.label === label && !held.has(each.id)).map(({ id }) => id));
        const whole = device.groups.filter((group) => group.label === label && group.images.every((image) => training.has(image)) && group.images.length >= manifest.min_images);
        const own = counts.filter((_, row) => labels[row] === at);
        assert.equal(own.reduce((sum, count) => sum + count, 0), whole.flatMap((group) => group.images).length);
        assert.ok(own.every((count) => count >= manifest.min_images && (own.length === 1 || count >= manifest.batch_size)));
        assert.equal(omitted.includes(at), training.size > 0 && !own.length);
      });
      assert.equal(prototypes.length, labels.length);
    }
  });
}

test("a class needs as many more images as it says", () => {
  for (let seed = 0; seed < 20; seed += 1) {
    const device = new Images(seed);
    const manifest = task({ batch_size: 4 + (seed % 3), min_images: 3 });
    for (let round = 0; round < 6; round += 1) {
      device.build(manifest);
      const { missing } = classReports(manifest, device.images, device.groups)[1];
      assert.ok(missing > 0);
      for (let image = 1; image < missing; image += 1) device.add("bee");
      const before = device.groups.length;
      device.build(manifest);
      assert.equal(device.groups.length, before, `${missing}`);
      device.add("bee");
      assert.equal(classReports(manifest, device.images, device.groups)[1].missing, 0);
      device.build(manifest);
      assert.equal(device.groups.length, before + 1);
    }
  }
});

test("a hostile task does not keep the device from counting what is missing", () => {
  const manifest = task({ alpha: 1e-9, batch_size: 65_535, min_images: 65_535 });
  assert.ok(classReports(manifest, [], [])[0].missing >= 2 ** 40);
});

test("one image more changes the side of at most one of the others", () => {
  const images = Array.from({ length: 60 }, (_, at) => digestOf(`${at}`));
  const isGrouped = (image) => image < "4";
  for (let count = 0; count < images.length; count += 1) {
    const before = heldOut(images.slice(0, count), isGrouped);
    const after = heldOut(images.slice(0, count + 1), isGrouped);
    const others = images.slice(0, count).filter((image) => before.has(image) !== after.has(image));
    assert.ok(others.length <= 1 && before.size <= heldOutCount(count));
  }
  assert.deepEqual([0, 4, 5, 9, 10, 14].map(heldOutCount), [0, 0, 1, 1, 2, 2]);
});

test("an encoded submission has what was prepared", async () => {
  const device = new Images(7);
  for (let image = 0; image < 23; image += 1) device.add("bee");
  for (let image = 0; image < 300; image += 1) device.add("ant");
  device.add("wasp");
  const prepared = device.build(task({ batch_size: 60, min_images: 10 }));
  const message = decodeMessage("submission", encodeSubmission(prepared, new Uint8Array(32).fill(3), 77));
  const { prototypes, labels, counts, tensors, omitted_classes, images, sequence } = message;
  assert.deepEqual([sequence, images, omitted_classes], [77, 324, [2]]);
  assert.deepEqual(prototypes.shape, [prepared.labels.length, SIZE]);
  assert.deepEqual([labels.dtype, [...labels.data]], ["u1", prepared.labels]);
  assert.deepEqual([counts.dtype, [...counts.data]], ["u1", prepared.counts]);
  assert.deepEqual([tensors.range.dtype, tensors.range.shape, Object.keys(tensors)], ["f2", [2, SIZE], ["range"]]);
  assert.equal(await fingerprint(prepared), await fingerprint({ ...prepared, images: 1 }));
  assert.notEqual(await fingerprint(prepared), await fingerprint({ ...prepared, labels: prepared.labels.map((label) => label + 1) }));
});

test("counts of more than 255 images take two bytes", () => {
  const prepared = { groups: [], prototypes: [[1, 2]], labels: [0], counts: [1000], images: 1000, omitted: [] };
  const { counts } = decodeMessage("submission", encodeSubmission(prepared, new Uint8Array(32), 1));
  assert.deepEqual([counts.dtype, [...counts.data]], ["u2", [0xe8, 3]]);
});

test("prototypes have the task's columns, which must be there", () => {
  const device = new Images(1);
  for (let image = 0; image < 10; image += 1) device.add("bee");
  const { prototypes } = device.build(task({ columns: [[0, 2], [4, 6]] }));
  assert.equal(prototypes[0].length, 4);
  for (const columns of [[[0, SIZE + 1]], [[2, 2]], [[3, 1]], [[0, 4], [2, 6]]]) {
    assert.throws(() => device.build(task({ columns })), NoSubmission);
  }
});

test("features that half precision does not have are refused", () => {
  const device = new Images(1);
  for (let image = 0; image < 10; image += 1) device.add("bee");
  for (const [id] of device.features) device.features.set(id, new Float32Array(SIZE).fill(1e6));
  assert.throws(() => device.build(task()), NoSubmission);
});

test("an evaluation counts, and a refused head has a problem", () => {
  const answer = (label, probabilities, novelty = null) => ({ label, probabilities: Float32Array.from(probabilities), novelty });
  const answers = [answer(0, [0.9, 0.1]), answer(0, [0.2, 0.8]), answer(1, [0.3, 0.7]), answer(1, [0.5, 0.5])];
  const head = { task: new Uint8Array(32), version: 3, classes: 2 };
  const evaluation = decodeMessage("evaluation", encodeEvaluation(head, answers, [2, 0], [2, 2]));
  assert.deepEqual([evaluation.correct, evaluation.incorrect, evaluation.previous_correct], [[1, 1], [1, 1], [2, 0]]);
  assert.deepEqual(evaluation.confused, [{ label: 0, predicted: 1, images: 1 }, { label: 1, predicted: 0, images: 1 }]);
  assert.equal(evaluation.confidence_images.reduce((sum, count) => sum + count), 4);
  assert.equal(evaluation.confidence_correct.reduce((sum, count) => sum + count), 2);
  assert.equal(evaluation.novelty_images, undefined);
  const withNovelty = decodeMessage("evaluation", encodeEvaluation(head, [answer(0, [1, 0], 0.5)], null, [1, 0]));
  assert.deepEqual([withNovelty.novelty_images[16], withNovelty.previous_correct, withNovelty.correct_with_prior], [1, [], 1]);
  const empty = decodeMessage("evaluation", encodeEvaluation(head, [], null, [0, 0]));
  assert.deepEqual([empty.correct, empty.confidence_images, empty.confused, empty.correct_with_prior], [[0, 0], undefined, undefined, undefined]);
  const refused = decodeMessage("evaluation", encodeRefusal(head, "😀".repeat(300)));
  assert.deepEqual([refused.correct, [...refused.problem].length], [[0, 0], 256]);
});
