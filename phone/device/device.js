// @ts-check
/** A phone as a device of a fleet: what the page calls. `openDevice` opens it, and `device.state` shows it. */

import { OWN_NAME } from "./address.js";
import { Classifier } from "./classifier.js";
import { Features } from "./features.js";
import { enroll, JoinError, makeKey, readLink, requireName, unhex } from "./membership.js";
import { Session } from "./session.js";
import { deviceState } from "./state.js";
import { Store, StorageFull } from "./store.js";
import { Work } from "./work.js";
import { NO_TRUST } from "../wire/trust.js";

/** @typedef {import("./state.js").DeviceState} DeviceState */
/** @typedef {import("./store.js").StoredImage} StoredImage */

export { JoinError } from "./membership.js";
export { StorageFull } from "./store.js";
export { UnusableImage } from "../core/pixels.js";

const LOCK = `${OWN_NAME}-device`;
/** Milliseconds within which changes are shown together. */
const SHOW_MS = 50;

/** An image that is not taken, by a word: `file` without persistent storage, `label` of no class, `phase` before a task. */
export class RefusedImage extends Error {}

/** Return true if this page can keep files: with blocked cookies it can keep nothing, in WebKit's private windows no file. */
async function canStore() {
  try {
    const store = await Store.open();
    const written = store.setFacts({ test: new Blob(["file"]) });
    await written.finally(() => store.database.close());
    return true;
  } catch (error) {
    return error instanceof StorageFull;
  }
}

/**
 * Return what this browser lacks to be a device; empty if nothing.
 * @returns {Promise<("secure" | "ed25519" | "storage" | "wasm" | "canvas")[]>}
 */
export async function missingFeatures() {
  if (!isSecureContext || !crypto.subtle) return ["secure"];
  const hasKeys = await makeKey().then(() => true, () => false);
  const context = new OffscreenCanvas(16, 16).getContext("2d", { willReadFrequently: true });
  const pixels = new ImageData(Uint8ClampedArray.from({ length: 1024 }, (_, at) => (at % 4 === 3 ? 255 : (at * 37) % 256)), 16, 16);
  context?.putImageData(pixels, 0, 0);
  // Some browsers change pixels on purpose.
  const isSame = context?.getImageData(0, 0, 16, 16).data.every((level, at) => level === pixels.data[at]);
  /** @type {["ed25519" | "storage" | "wasm" | "canvas", boolean][]} */
  const has = [["ed25519", hasKeys], ["storage", "locks" in navigator && (await canStore())], ["wasm", "WebAssembly" in globalThis], ["canvas", Boolean(isSame)]];
  return has.filter(([, holds]) => !holds).map(([name]) => name);
}

/**
 * Open the device of this browser. In another tab it waits until this one is closed.
 * @param {{onChange: (state: DeviceState) => void}} options
 * @returns {Promise<Device>} once it is known if another tab is the device
 */
export async function openDevice({ onChange }) {
  const device = new Device(onChange);
  await device.open();
  return device;
}

export class Device {
  /** @type {Store} */
  #store = /** @type {any} */ (null);
  #features = new Features(async (digest) => {
    const row = await this.#store.get("blobs", digest);
    if (!row) throw new Error(`the blob ${digest} is not stored`);
    return row.blob;
  });
  /** @type {Work} */
  #work = /** @type {any} */ (null);
  /** @type {Session | null} */
  #session = null;
  /** @type {Classifier | null} */
  #classifier = null;
  /** @type {import("./state.js").Known} */
  #known = {
    phase: "starting", membership: null, images: [], groups: [], heads: null, left: [], storage: { persistent: false, full: false }, problem: null, unusable: 0,
  };
  #isShowing = false;

  /** @param {(state: DeviceState) => void} onChange */
  constructor(onChange) {
    this.onChange = onChange;
    this.state = deviceState(this.#known, null);
  }

  /** Become the device, or wait until the tab that is the device is closed. */
  open() {
    return new Promise((/** @type {(value: void) => void} */ resolve, reject) => {
      // The lock is held until the tab is closed.
      const hold = () => new Promise(() => void this.#start().then(resolve, reject));
      navigator.locks.request(LOCK, { ifAvailable: true }, (lock) => {
        if (lock) return hold();
        this.#change({ phase: "other_tab" });
        resolve();
        void navigator.locks.request(LOCK, hold);
      });
    });
  }

  /**
   * Join a fleet by a link.
   * @param {string} text
   * @param {string} name of the device; empty for the link's proposal
   * @throws {JoinError}
   */
  async join(text, name) {
    const link = readLink(text);
    const device = name || link.name;
    requireName(device);
    if (this.#known.phase !== "alone") throw new JoinError("refused");
    // A lost answer is answered again to the same key.
    const before = await this.#store.fact("joining");
    const key = before?.link === text && before.name === device ? before.key : await makeKey();
    await this.#store.setFacts({ joining: { link: text, name: device, key } });
    const { address, fleet, secret } = link;
    const known = secret ? await enroll({ ...link, secret }, device, key) : { key: unhex(link.key), number: 0, root: null };
    const membership = { fleet, device, address, isClosed: Boolean(secret) };
    const facts = Store.facts({ membership, key, trust: { ...NO_TRUST, ...known } });
    await this.#store.write({ facts }, { facts: ["joining"] });
    this.#change({ phase: "member", membership });
    this.#keepStorage();
    await this.#connect();
  }

  /**
   * Add an image, or label one of the same pixels again.
   * @param {{pixels?: ImageData, blob?: Blob, label: string, origin: "camera" | "file"}} image
   * @returns {Promise<string>} its id
   * @throws {RefusedImage | StorageFull | import("../core/pixels.js").UnusableImage}
   */
  async addImage({ pixels, blob, label, origin }) {
    const source = pixels ?? blob;
    if (!this.state.task || !source) throw new RefusedImage("phase");
    if (!this.state.task.classes.includes(label)) throw new RefusedImage("label");
    // Storage that was evicted has lost its groups: then only images that are taken since may leave.
    if (origin === "file" && !this.#known.storage.persistent) throw new RefusedImage("file");
    const { file, id } = await this.#features.take(source);
    const image = { id, label, time_s: Date.now() / 1000, origin };
    await this.#write({ images: [image], files: [{ id, blob: file }] });
    this.#setImages([...this.#known.images.filter((each) => each.id !== id), image]);
    return id;
  }

  /** @param {string} id @param {string} label */
  async relabel(id, label) {
    if (!this.state.task?.classes.includes(label)) throw new RefusedImage("label");
    const image = this.#known.images.find((each) => each.id === id);
    if (!image || image.label === label) return;
    const after = { ...image, label };
    await this.#write({ images: [after] });
    this.#setImages(this.#known.images.map((each) => (each.id === id ? after : each)));
  }

  /** @param {string[]} ids */
  async deleteImages(ids) {
    const deleted = new Set(ids);
    const remove = () => this.#setImages(this.#known.images.filter(({ id }) => !deleted.has(id)));
    remove(); // from now on, no relabeling and no feature of them is stored
    const features = (await this.#store.keys("features")).filter(([, image]) => deleted.has(image));
    await this.#store.write({}, { images: ids, files: ids, features });
    this.#hasRoom();
    remove(); // some were perhaps added again meanwhile
  }

  /** Return the file of an image. @param {string} id @returns {Promise<Blob | null>} */
  async imageBlob(id) {
    return (await this.#store.get("files", id))?.blob ?? null;
  }

  /**
   * Return the prediction for an image; null without a head.
   * @param {ImageData | Blob} image
   * @returns {Promise<import("./classifier.js").Prediction | null>}
   * @throws {import("../core/pixels.js").UnusableImage | import("../core/onnx_file.js").RefusedFile} the head or the backbone fails
   */
  async classify(image) {
    return this.#classifier ? this.#classifier.classify(image, this.#known.images) : null;
  }

  /** Return images whose labels a person should check; none without a head. @returns {Promise<import("./classifier.js").Suspicion[]>} */
  async suspicious() {
    const classifier = this.#classifier;
    if (!classifier) return [];
    const { backbone, classes } = classifier.head;
    const images = this.#known.images.filter(({ label }) => classes.includes(label));
    return classifier.suspicious(images, await this.#work.featuresOf(backbone, images));
  }

  /** Leave the fleet, and delete everything, the key as well. The page is loaded anew after it. */
  async leave() {
    const session = this.#session;
    this.#session = null;
    await session?.stop();
    this.#features.end();
    await this.#store.deleteAll();
    this.#known = { ...this.#known, images: [], groups: [], left: [], heads: null, problem: null };
    this.#classifier = null;
    this.#change({ phase: "alone", membership: null });
    this.#store = await Store.open();
    this.#work.store = this.#store;
  }

  async #start() {
    this.#store = await Store.open();
    this.#work = new Work(this.#store, this.#features, () => this.#known);
    const [images, groups, left, membership, heads, replaced, persistent] = await Promise.all([
      this.#store.all("images"), this.#store.all("groups"), this.#store.all("left"), this.#store.fact("membership"),
      this.#store.fact("heads"), this.#store.fact("replaced"), navigator.storage?.persisted() ?? false,
    ]);
    images.sort((a, b) => a.time_s - b.time_s);
    const problem = replaced ? { key: /** @type {const} */ ("replaced"), detail: "" } : null;
    this.#change({
      phase: membership ? "member" : "alone", images, groups, left, membership: membership ?? null, heads: heads ?? null, problem,
      storage: { persistent, full: false },
    });
    if (heads) this.#classifier = new Classifier(this.#features, heads.installed);
    if (membership && !persistent) this.#keepStorage();
    if (membership && !replaced) await this.#connect();
    // A frozen page answers nothing: the broker publishes the will.
    document.addEventListener("freeze", () => this.#session?.connection.abandon());
    addEventListener("pagehide", () => this.#session?.connection.abandon());
    for (const target of [document, globalThis]) {
      for (const event of ["resume", "visibilitychange", "online", "pageshow"]) target.addEventListener(event, () => this.#wake());
    }
  }

  /** Ask the browser to keep the storage, without waiting: Firefox asks the person, who may not answer. */
  #keepStorage() {
    void navigator.storage?.persist().then((persistent) => this.#change({ storage: { ...this.#known.storage, persistent } }));
  }

  #wake() {
    if (document.visibilityState !== "visible" || !this.#session || this.#session.state.ended) return;
    this.#session.connection.start();
    this.#session.connection.wake();
  }

  async #connect() {
    const [membership, key] = await Promise.all([this.#store.fact("membership"), this.#store.fact("key")]);
    if (!membership || !key) return;
    try {
      this.#session = await this.#opened(membership, key);
    } catch (error) {
      if (!(error instanceof StorageFull)) throw error;
      this.#change({ storage: { ...this.#known.storage, full: true } });
    }
  }

  /** @param {import("./store.js").Membership} membership @param {import("./membership.js").Key} key */
  #opened(membership, key) {
    return Session.open({
      store: this.#store, features: this.#features, work: this.#work, membership, key,
      imageCounts: () => this.#counts(),
      onChange: (change) => void this.#changed(change),
      onCrash: (error) => {
        if (!this.#session) return; // the device has left, and its store is gone
        console.error(error);
        this.#change({ problem: { key: "crashed", detail: String(error) } });
      },
    });
  }

  #counts() {
    const classes = this.state.task?.classes ?? [];
    const counts = classes.map((label) => [label, this.#known.images.filter((image) => image.label === label).length]);
    return { images: Object.fromEntries(counts.filter(([, count]) => count)), unusable: this.#work.unusable.size };
  }

  /** @param {Parameters<import("./session.js").Parts["onChange"]>[0]} change */
  async #changed({ groups = [], heads, isFull }) {
    if (heads) {
      this.#classifier = new Classifier(this.#features, heads.installed);
      await this.#features.keep([heads.installed, heads.previous].flatMap((each) => (each ? [each.head, each.backbone] : [])));
    }
    const known = this.#known; // after the wait, in which groups may have been made
    this.#change({
      groups: groups.length ? [...known.groups, ...groups] : known.groups,
      heads: heads ?? known.heads,
      storage: isFull === undefined ? known.storage : { ...known.storage, full: isFull },
      unusable: this.#work.unusable.size,
    });
  }

  /** @param {StoredImage[]} images */
  #setImages(images) {
    this.#change({ images });
    this.#session?.emit({ type: "imagesChanged" });
  }

  /** @param {Parameters<Store["write"]>[0]} puts */
  async #write(puts) {
    try {
      await this.#store.write(puts);
      this.#hasRoom();
    } catch (error) {
      if (error instanceof StorageFull) this.#change({ storage: { ...this.#known.storage, full: true } });
      throw error;
    }
  }

  #hasRoom() {
    if (!this.#known.storage.full) return;
    this.#change({ storage: { ...this.#known.storage, full: false } });
    if (this.#session) this.#session.emit({ type: "full", isFull: false });
    else void this.#connect(); // a full storage did not let it open
  }

  /** @param {Partial<import("./state.js").Known>} change */
  #change(change) {
    this.#known = { ...this.#known, ...change };
    if (this.#isShowing) return;
    this.#isShowing = true;
    setTimeout(async () => {
      this.#isShowing = false;
      const left = this.#session ? await this.#store.all("left") : null;
      this.#known = { ...this.#known, left: left ?? this.#known.left };
      this.state = deviceState(this.#known, this.#session?.shown ?? null);
      this.onChange(this.state);
    }, SHOW_MS);
  }
}
