// @ts-check
/** The work of a device: features of its images, submissions, and heads, from the store into the store. */

import { RefusedFile } from "../core/onnx_file.js";
import { UnusableImage } from "../core/pixels.js";
import { hex, sha256 } from "../wire/signatures.js";
import { correctImages, encodeEvaluation, encodeRefusal } from "./evaluation.js";
import { GraphFailed } from "./features.js";
import { MAX_HEAD_BYTES } from "./machine.js";
import { Store } from "./store.js";
import { encodeSubmission, fingerprint, heldOutImages, prepare } from "./submission.js";
import { unhex } from "./membership.js";

/** @typedef {import("./store.js").StoredImage} StoredImage */
/** @typedef {import("./store.js").StoredGroup} StoredGroup */
/** @typedef {import("./machine.js").Task} Task */
/** @typedef {import("./machine.js").HeadRef} HeadRef */
/** @typedef {import("./uploads.js").Item} Item */
/** @typedef {Item & {payload: Uint8Array, prototypes: number, images: number}} OutboxRow `images` are those in prototypes */
/** @typedef {{images: StoredImage[], groups: StoredGroup[]}} Collection */
/** @typedef {{item: Item | null, groups: StoredGroup[]}} Built */
/** @typedef {{report: Item | null, reason: string, heads: import("./store.js").Facts["heads"] | null}} Installed */

/** Times that a graph may fail on an image, which may have been the one before it. */
const MAX_FAILURES = 2;

/** The images have changed during the work. */
export class Changed extends Error {}

/** @param {OutboxRow} row @returns {Item} */
export const itemOf = ({ digest, size_bytes, kind, task, about, received }) => ({ digest, size_bytes, kind, task, about, received });

/** Return the images in an order that is secret and random. @param {string[]} images */
export function shuffled(images) {
  const all = [...images];
  for (let left = all.length; left > 1; left -= 1) {
    const at = randomBelow(left);
    [all[left - 1], all[at]] = [all[at], all[left - 1]];
  }
  return all;
}

/** @param {number} limit */
function randomBelow(limit) {
  const most = 2 ** 32 - (2 ** 32 % limit);
  const value = new Uint32Array(1);
  do crypto.getRandomValues(value); while (value[0] >= most);
  return value[0] % limit;
}

export class Work {
  /** Images that cannot be used. @type {Set<string>} */
  unusable = new Set();
  /** Failures of a backbone on an image. @type {Map<string, number>} */
  #failures = new Map();

  /**
   * @param {Store} store
   * @param {import("./features.js").Features} features
   * @param {() => Collection} collection the images and groups as they are now
   */
  constructor(store, features, collection) {
    this.store = store;
    this.features = features;
    this.collection = collection;
  }

  /** Return the features of images, without those that cannot be used. @param {string} backbone hex digest @param {StoredImage[]} images @returns {Promise<Map<string, Float32Array>>} */
  async featuresOf(backbone, images) {
    /** @type {Map<string, Float32Array>} */
    const found = new Map();
    for (const { id } of images) {
      const feature = await this.#feature(backbone, id);
      if (feature) found.set(id, feature);
    }
    return found;
  }

  /** @param {string} backbone @param {string} image @returns {Promise<Float32Array | null>} */
  async #feature(backbone, image) {
    const row = await this.store.get("features", [backbone, image]);
    if (row) return row.feature;
    const file = await this.store.get("files", image);
    if (!file || this.unusable.has(image)) return null;
    try {
      const feature = await this.features.feature(backbone, file.blob);
      if (!this.collection().images.some(({ id }) => id === image)) return null; // deleted meanwhile
      await this.store.write({ features: [{ backbone, image, feature }] }, {}, "relaxed");
      return feature;
    } catch (error) {
      const key = `${backbone} ${image}`;
      const failures = (this.#failures.get(key) ?? 0) + 1;
      this.#failures.set(key, failures);
      const isGuilty = error instanceof UnusableImage || (error instanceof GraphFailed && failures >= MAX_FAILURES);
      if (!isGuilty) throw error;
      this.unusable.add(image);
      return null;
    }
  }

  /**
   * Build a submission, and store it with its groups; an equal one that is in the outbox stays.
   * @param {string} task hex digest
   * @param {Task} manifest
   * @param {number} above
   * @returns {Promise<Built>} without an item if no class has a prototype
   * @throws {Changed | import("./submission.js").NoSubmission | RefusedFile | import("./store.js").StorageFull}
   */
  async build(task, manifest, above) {
    const { images, groups } = this.collection();
    const backbone = hex(manifest.backbones[0].digest);
    const own = images.filter(({ label }) => manifest.classes.includes(label));
    const features = await this.featuresOf(backbone, own);
    const prepared = prepare(manifest, own.filter(({ id }) => features.has(id)), groups, features, shuffled);
    if (this.collection().images !== images) throw new Changed();
    if (!prepared.prototypes.length) return { item: null, groups: [] };

    const about = await fingerprint(prepared);
    const rows = /** @type {OutboxRow[]} */ (await this.store.all("outbox")).filter(({ kind }) => kind === "submission");
    const tasks = [task, ...(manifest.continues ?? []).map(hex)];
    const last = rows.find((row) => !above && row.about === about && tasks.includes(row.task));
    if (last) {
      const row = { ...last, task };
      await this.store.write({ outbox: [row], groups: prepared.groups });
      return { item: itemOf(row), groups: prepared.groups };
    }
    const sequence = Math.max((await this.store.fact("sequence")) ?? 0, above, Math.floor(Date.now() / 1000) - 1) + 1;
    const payload = encodeSubmission(prepared, unhex(task), sequence);
    const counted = prepared.counts.reduce((sum, count) => sum + count, 0);
    const row = await outboxRow("submission", payload, { task, about, prototypes: prepared.prototypes.length, images: counted });
    const puts = { groups: prepared.groups, outbox: [row], facts: Store.facts({ sequence }) };
    if (this.collection().images !== images) throw new Changed();
    await this.store.write(puts, { outbox: rows.map(({ digest }) => digest) });
    return { item: itemOf(row), groups: prepared.groups };
  }

  /**
   * Install and evaluate a head, or refuse it with a report.
   * @param {string} task hex digest
   * @param {Task} manifest
   * @param {HeadRef} head
   * @returns {Promise<Installed>}
   */
  async install(task, manifest, { version, head }) {
    const digest = hex(head.digest);
    const backbone = hex(manifest.backbones[0].digest);
    const { classes } = manifest;
    const described = { task: unhex(task), version, classes: classes.length };
    try {
      await this.features.backbone(backbone);
    } catch (error) {
      // No fault of the head: the device has no vote.
      if (error instanceof RefusedFile) return { report: null, reason: error.message, heads: null };
      throw error;
    }
    try {
      if (head.size_bytes > MAX_HEAD_BYTES) throw new RefusedFile("more than 64 MiB");
      await this.features.head(digest, { backbone, classes });
      const answers = await this.#answers(digest, manifest);
      const heads = await this.store.fact("heads");
      const before = [heads?.installed, heads?.previous].find((each) => each && each.head !== digest) ?? null;
      const previous = before?.task === task ? correctImages(classes.length, await this.#answers(before.head, manifest)) : null;
      const labels = classes.map((label) => this.collection().images.filter((image) => image.label === label).length);
      const payload = encodeEvaluation(described, answers, previous, labels);
      const installed = { head: digest, version: Number(version), task, backbone, classes };
      return await this.#leave(task, digest, payload, { installed, previous: before });
    } catch (error) {
      if (!(error instanceof RefusedFile)) throw error;
      const reason = `head ${version} refused, the previous head stays in use: ${error.message}`;
      return { ...(await this.#leave(task, digest, encodeRefusal(described, error.message), null)), reason };
    }
  }

  /** Return a head's answers to the held-out images. @param {string} head of this task @param {Task} manifest */
  async #answers(head, manifest) {
    const { classes, backbones } = manifest;
    const backbone = hex(backbones[0].digest);
    const { images, groups } = this.collection();
    const held = heldOutImages(images, groups);
    const own = classes.flatMap((label) => images.filter((image) => image.label === label && held.has(image.id)));
    const features = await this.featuresOf(backbone, own);
    const usable = own.filter(({ id }) => features.has(id));
    await this.features.head(head, { backbone, classes });
    const results = await this.features.runHead(head, usable.map(({ id }) => /** @type {Float32Array} */ (features.get(id))));
    return results.map((result, at) => ({ ...result, label: classes.indexOf(usable[at].label) }));
  }

  /** @param {string} task @param {string} about @param {Uint8Array} payload @param {Installed["heads"]} heads @returns {Promise<Installed>} */
  async #leave(task, about, payload, heads) {
    const row = await outboxRow("evaluation", payload, { task, about, prototypes: 0, images: 0 });
    const before = (await this.store.all("outbox")).filter(({ kind }) => kind === "evaluation").map(({ digest }) => digest);
    await this.store.write({ outbox: [row], ...(heads && { facts: Store.facts({ heads }) }) }, { outbox: before });
    return { report: itemOf(row), reason: "", heads };
  }
}

/** @param {Item["kind"]} kind @param {Uint8Array} payload @param {Pick<OutboxRow, "task" | "about" | "prototypes" | "images">} fields @returns {Promise<OutboxRow>} */
const outboxRow = async (kind, payload, fields) =>
  ({ digest: hex(await sha256(payload)), size_bytes: payload.length, kind, received: false, payload, ...fields });
