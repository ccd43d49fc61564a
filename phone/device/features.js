// @ts-check
/** Graphs on images, in a worker that is ended when one takes too long. */

import { RefusedFile } from "../core/onnx_file.js";
import { UnusableImage } from "../core/pixels.js";

/** @typedef {import("./worker.js").Calls} Calls */
/** @typedef {import("./worker.js").Expected} Expected */
/** @typedef {{probabilities: Float32Array, novelty: number | null}} HeadResult */

/** Seconds that a call may take, far above what the slowest phone needs. */
const LIMIT_S = { start: 120, take: 120, openBackbone: 600, feature: 120, openHead: 120, runHead: 120, keep: 120 };

/** Threads, where the page is cross-origin isolated. */
const MAX_THREADS = 4;

/** A graph that failed, or took too long. */
export class GraphFailed extends RefusedFile {}

/** @param {{kind: string, message: string}} error */
function raised({ kind, message }) {
  if (kind === "UnusableImage") return new UnusableImage(message);
  if (kind === "RefusedFile") return new RefusedFile(message);
  return new GraphFailed(message);
}

export class Features {
  /** @type {Worker | null} */
  #worker = null;
  /** The worker has the oldest of them; the others wait. @type {Map<number, {name: keyof Calls, resolve: (result: any) => void, reject: (error: Error) => void}>} */
  #calls = new Map();
  /** Ends the worker when its call takes too long. @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  #number = 0;
  /** Graphs that the worker has open, with what their opening returned. @type {Map<string, Promise<any>>} */
  #open = new Map();

  /** @param {(digest: string) => Promise<Blob>} read a stored blob */
  constructor(read) {
    this.read = read;
  }

  /** Return a file for an image, and the digest of its pixels. @param {Blob | ImageData} source @returns {ReturnType<Calls["take"]>} */
  take(source) {
    return this.#call("take", [source]);
  }

  /** Return the feature of an image. @param {string} backbone @param {Blob | ImageData} source @returns {Promise<Float32Array>} */
  async feature(backbone, source) {
    await this.backbone(backbone);
    return this.#call("feature", [backbone, source]);
  }

  /** Open a backbone, and return the number of values of a feature. @param {string} digest @returns {Promise<number>} */
  backbone(digest) {
    return this.#opened(digest, async () => this.#call("openBackbone", [digest, await this.read(digest)]));
  }

  /** Open and test a head. @param {string} digest @param {{backbone: string, classes: string[]}} here @returns {Promise<{threshold: number | null}>} */
  head(digest, { backbone, classes }) {
    return this.#opened(digest, async () => {
      const featureSize = await this.backbone(backbone);
      return this.#call("openHead", [digest, await this.read(digest), { backbone, classes, featureSize }]);
    });
  }

  /** @param {string} digest of an open head @param {Float32Array[]} features @returns {Promise<HeadResult[]>} */
  runHead(digest, features) {
    return this.#call("runHead", [digest, features]);
  }

  /** Close all graphs but these. @param {string[]} digests */
  async keep(digests) {
    for (const digest of this.#open.keys()) if (!digests.includes(digest)) this.#open.delete(digest);
    // A worker that has failed has closed them.
    if (this.#worker) await this.#call("keep", [digests]).catch(() => {});
  }

  /** End the worker. @param {Error} [error] for the calls that wait */
  end(error = new GraphFailed("ended")) {
    this.#worker?.terminate();
    this.#worker = null;
    this.#open.clear();
    for (const { reject } of this.#calls.values()) reject(error);
    this.#calls.clear();
    clearTimeout(this.#timer);
  }

  /** @template T @param {string} digest @param {() => Promise<T>} open @returns {Promise<T>} */
  #opened(digest, open) {
    let found = this.#open.get(digest);
    if (!found) {
      found = open();
      this.#open.set(digest, found);
      found.catch(() => {
        if (this.#open.get(digest) === found) this.#open.delete(digest);
      });
    }
    return found;
  }

  /** @param {keyof Calls} name @param {any[]} parts @returns {Promise<any>} */
  #call(name, parts) {
    if (!this.#worker) this.#start();
    this.#number += 1;
    const id = this.#number;
    return new Promise((resolve, reject) => {
      this.#calls.set(id, { name, resolve, reject });
      this.#worker?.postMessage({ id, name, parts });
      if (this.#calls.size === 1) this.#limitTime();
    });
  }

  #limitTime() {
    clearTimeout(this.#timer);
    const [oldest] = this.#calls.values();
    if (!oldest) return;
    const limit = LIMIT_S[oldest.name];
    this.#timer = setTimeout(() => this.end(new GraphFailed(`${oldest.name} took more than ${limit} s`)), limit * 1000);
  }

  #start() {
    this.#worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module", name: "features" });
    this.#worker.onmessage = ({ data }) => this.#answered(data);
    this.#worker.onerror = ({ message }) => this.end(new GraphFailed(`the worker has ended: ${message}`));
    const threads = crossOriginIsolated ? Math.min(MAX_THREADS, navigator.hardwareConcurrency) : 1;
    this.#call("start", [threads]).catch(() => {});
  }

  /** @param {{id: number, result: any, error?: {kind: string, message: string}}} answer */
  #answered({ id, result, error }) {
    const call = this.#calls.get(id);
    if (!call) return;
    this.#calls.delete(id);
    this.#limitTime();
    if (!error) return call.resolve(result);
    const problem = raised(error);
    call.reject(problem);
    // ONNX Runtime does not recover where its memory is used up.
    if (problem instanceof GraphFailed) this.end(problem);
  }
}
