// @ts-check
/** What a device keeps in IndexedDB. Whatever must change together is written in one transaction. */

import { OWN_NAME } from "./address.js";

/** Object stores, with the key of a record. Digests are lower-case hex. */
const STORES = {
  facts: "name", // single values, see `Facts`
  images: "id",
  files: "id", // the image files
  features: ["backbone", "image"],
  groups: "number",
  outbox: "digest",
  left: "digest", // what has left the phone
  blobs: "digest",
  parts: ["digest", "offset"], // of a download that is not whole
};

/** @typedef {keyof typeof STORES} StoreName */
/**
 * @typedef {object} StoredImage
 * @property {string} id hex sha256 of the pixels: images of the same pixels are one image
 * @property {string} label name of its class
 * @property {number} time_s unix seconds
 * @property {"camera" | "file"} origin
 */
/** @typedef {{number: number, label: string, images: string[]}} StoredGroup */
/** @typedef {{digest: string, offset: number, data: Uint8Array}} Part */
/**
 * @typedef {object} Membership
 * @property {string} fleet
 * @property {string} device
 * @property {string} address of the aggregator's pages, such as `https://fleet.example`
 * @property {boolean} isClosed the fleet has enrolled the device's key
 */
/**
 * @typedef {object} Facts
 * @property {Membership} membership
 * @property {{privateKey: CryptoKey, publicKey: Uint8Array}} key
 * @property {{link: string, name: string, key: Facts["key"]}} joining a request to join whose answer is awaited
 * @property {import("../wire/trust.js").Trust} trust
 * @property {Uint8Array} task the newest task's manifest, as received
 * @property {string} evaluated hex digest of the last head whose evaluation was received
 * @property {{installed: InstalledHead, previous: InstalledHead | null}} heads
 * @property {number} sequence of the newest submission
 * @property {number} epoch of the last start
 * @property {boolean} replaced a copy of this device has started later
 * @property {Blob} test that files can be stored
 */
/**
 * @typedef {object} InstalledHead
 * @property {string} head hex digest of its file
 * @property {number} version
 * @property {string} task hex
 * @property {string} backbone hex digest
 * @property {string[]} classes
 */

/** The browser has no room: nothing of the change was stored. */
export class StorageFull extends Error {
  constructor() {
    super("the browser's storage is full");
  }
}

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
const answer = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** @param {unknown} error */
const stored = (error) => (error instanceof DOMException && error.name === "QuotaExceededError" ? new StorageFull() : error);

/** Key ranges of all records whose first part of the key is `first`. @param {string} first */
const startingWith = (first) => IDBKeyRange.bound([first], [first, []]);

export class Store {
  /** @param {IDBDatabase} database */
  constructor(database) {
    this.database = database;
  }

  static async open() {
    const request = indexedDB.open(OWN_NAME, 1);
    request.onupgradeneeded = () => {
      for (const [name, keyPath] of Object.entries(STORES)) request.result.createObjectStore(name, { keyPath });
    };
    return new Store(await answer(request));
  }

  /**
   * Write and delete records in one transaction, and return when they are on the disk.
   * @param {Partial<Record<StoreName, any[]>>} puts
   * @param {Partial<Record<StoreName, (IDBValidKey | IDBKeyRange)[]>>} [deletes] done before the puts
   * @param {"strict" | "relaxed"} [durability] `relaxed` for what can be fetched or computed again
   * @throws {StorageFull} nothing was stored
   */
  async write(puts, deletes = {}, durability = "strict") {
    const names = /** @type {StoreName[]} */ ([...new Set([...Object.keys(puts), ...Object.keys(deletes)])]);
    const transaction = this.database.transaction(names, "readwrite", { durability });
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(stored(transaction.error));
    });
    try {
      for (const name of names) {
        const store = transaction.objectStore(name);
        for (const key of deletes[name] ?? []) store.delete(key);
        for (const value of puts[name] ?? []) store.put(value);
      }
    } catch (error) {
      transaction.abort();
      await done.catch(() => {});
      throw stored(error);
    }
    await done;
  }

  /** @param {StoreName} name @param {IDBValidKey} key @returns {Promise<any>} undefined if there is none */
  get(name, key) {
    return answer(this.#read(name).get(key));
  }

  /** @param {StoreName} name @param {IDBKeyRange} [range] @returns {Promise<any[]>} */
  all(name, range) {
    return answer(this.#read(name).getAll(range));
  }

  /** @param {StoreName} name @returns {Promise<any[]>} */
  keys(name) {
    return answer(this.#read(name).getAllKeys());
  }

  /** @template {keyof Facts} N @param {N} name @returns {Promise<Facts[N] | undefined>} */
  async fact(name) {
    return (await this.get("facts", name))?.value;
  }

  /**
   * Return facts as records of the store `facts`.
   * @param {Partial<Facts>} facts
   */
  static facts(facts) {
    return Object.entries(facts).map(([name, value]) => ({ name, value }));
  }

  /** @param {Partial<Facts>} facts */
  setFacts(facts) {
    return this.write({ facts: Store.facts(facts) });
  }

  /** Return how many first bytes of a blob are stored. @param {string} digest */
  async partBytes(digest) {
    const cursor = await answer(this.#read("parts").openCursor(startingWith(digest), "prev"));
    return cursor ? cursor.value.offset + cursor.value.data.length : 0;
  }

  /** Return the parts of a blob in their order. @param {string} digest @returns {Promise<Part[]>} */
  parts(digest) {
    return this.all("parts", startingWith(digest));
  }

  /** Store a whole blob in place of its parts. @param {string} digest @param {Blob} blob */
  keepBlob(digest, blob) {
    return this.write({ blobs: [{ digest, blob }] }, { parts: [startingWith(digest)] });
  }

  /** @param {string} digest */
  dropParts(digest) {
    return this.write({}, { parts: [startingWith(digest)] });
  }

  /**
   * Delete blobs, parts and features that nothing names any more.
   * @param {Set<string>} digests of the blobs that stay, with parts and features
   */
  async dropOthers(digests) {
    const [blobs, parts, features] = await Promise.all([this.keys("blobs"), this.keys("parts"), this.keys("features")]);
    const others = (/** @type {any[]} */ keys) => [...new Set(keys.map((key) => key[0]))].filter((digest) => !digests.has(digest));
    await this.write({}, {
      blobs: blobs.filter((digest) => !digests.has(digest)),
      parts: others(parts).map(startingWith),
      features: others(features).map(startingWith),
    });
  }

  /** Delete all that the device has stored. */
  async deleteAll() {
    this.database.close();
    await answer(indexedDB.deleteDatabase(OWN_NAME));
  }

  /** @param {StoreName} name */
  #read(name) {
    return this.database.transaction(name).objectStore(name);
  }
}
