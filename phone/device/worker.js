// @ts-check
/** The worker in which images are decoded, and graphs run: a graph that takes too long ends with it. */

import { onWhite, UnusableImage } from "../core/pixels.js";
import { backboneMetadata, headMetadata, refuseForeignHead } from "../core/metadata.js";
import { readOnnx, RefusedFile } from "../core/onnx_file.js";
import { preprocess } from "../core/preprocessing.js";
import { env, InferenceSession, Tensor } from "../vendor/ort.wasm.min.mjs";
import { hex, sha256 } from "../wire/signatures.js";

/** @typedef {import("../vendor/ort.wasm.min.mjs").InferenceSession} Session */
/** @typedef {import("../core/pixels.js").Image} Image */
/** @typedef {{backbone: string, featureSize: number, classes: string[]}} Expected */

const MAX_BACKBONE_BYTES = 2 ** 31;
const MAX_HEAD_BYTES = 2 ** 26;
const MAX_PIXELS = 2 ** 26;
const SUM_TOLERANCE = 1e-3;

/** @type {Map<string, {session: Session, metadata: import("../core/metadata.js").BackboneMetadata}>} */
const backbones = new Map();
/** @type {Map<string, {session: Session, metadata: import("../core/metadata.js").HeadMetadata}>} */
const heads = new Map();

/** A graph that ONNX Runtime cannot open or run: its memory may be used up. */
class GraphFailed extends Error {}

/** @template T @param {() => Promise<T>} run @returns {Promise<T>} */
async function guarded(run) {
  try {
    return await run();
  } catch (error) {
    throw new GraphFailed(String(error instanceof Error ? error.message : error).slice(0, 200));
  }
}

/** Of all images: the memory of a canvas is freed late. */
const canvas = new OffscreenCanvas(1, 1);

/** @param {Blob | ImageData} source @returns {Promise<ImageData>} */
async function decoded(source) {
  if (source instanceof ImageData) return source;
  /** @type {ImageBitmap} */
  let bitmap;
  try {
    bitmap = await createImageBitmap(source, { colorSpaceConversion: "none", premultiplyAlpha: "none", imageOrientation: "from-image" });
  } catch {
    throw new UnusableImage("no image that this browser reads");
  }
  const { width, height } = bitmap;
  try {
    if (width * height > MAX_PIXELS) throw new UnusableImage("more than 67 million pixels");
    [canvas.width, canvas.height] = [width, height];
    const context = /** @type {OffscreenCanvasRenderingContext2D} */ (canvas.getContext("2d", { willReadFrequently: true }));
    context.drawImage(bitmap, 0, 0);
    return context.getImageData(0, 0, width, height);
  } finally {
    bitmap.close();
  }
}

/** @param {Blob | ImageData} source @returns {Promise<Image>} */
async function imageOf(source) {
  const { data, width, height } = await decoded(source);
  return { data: onWhite(data), width, height };
}

/** @param {Session} session @param {"input" | "output"} side */
const slots = (session, side) => Object.fromEntries(
  session[`${side}Metadata`].map((each) => [each.name, each.isTensor ? `${each.type} ${each.shape.map((edge) => (typeof edge === "number" ? edge : "n"))}` : "no tensor"]),
);

/** @param {Session} session @param {Record<string, string>} inputs @param {Record<string, string>} outputs that it has at least */
function refuseSignature(session, inputs, outputs) {
  const has = slots(session, "output");
  const isSame = JSON.stringify(slots(session, "input")) === JSON.stringify(inputs);
  if (!isSame || Object.entries(outputs).some(([name, slot]) => has[name] !== slot)) throw new RefusedFile("other inputs or outputs");
}

/** @param {Uint8Array} file */
const opened = (file) => guarded(() => InferenceSession.create(file, { executionProviders: ["wasm"] }));

const CALLS = {
  /** @param {number} threads */
  async start(threads) {
    env.wasm.wasmPaths = new URL("../vendor/", import.meta.url).href;
    env.wasm.numThreads = threads;
  },

  /** Return a file for an image, and the digest of its pixels. @param {Blob | ImageData} source */
  async take(source) {
    let file = source;
    if (file instanceof ImageData) {
      const canvas = new OffscreenCanvas(file.width, file.height);
      /** @type {OffscreenCanvasRenderingContext2D} */ (canvas.getContext("2d")).putImageData(file, 0, 0);
      file = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
    }
    const { data, width, height } = await imageOf(file);
    const size = new TextEncoder().encode(`${width} ${height} `);
    const pixels = new Uint8Array(size.length + data.length);
    pixels.set(size);
    pixels.set(data, size.length);
    return { file, id: hex(await sha256(pixels)) };
  },

  /** @param {string} digest @param {Blob} file @returns {Promise<number>} values of a feature */
  async openBackbone(digest, file) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const metadata = backboneMetadata(readOnnx(bytes, { maxBytes: MAX_BACKBONE_BYTES, isDeterministic: true }));
    const { width, height } = metadata.preprocessing;
    const session = await opened(bytes);
    refuseSignature(session, { image: `uint8 n,${height},${width},3` }, { feature: `float32 n,${metadata.feature_size}` });
    backbones.set(digest, { session, metadata });
    return metadata.feature_size;
  },

  /** @param {string} digest of an open backbone @param {Blob | ImageData} source @returns {Promise<Float32Array>} */
  async feature(digest, source) {
    const { session, metadata } = /** @type {any} */ (backbones.get(digest));
    const { width, height } = metadata.preprocessing;
    const pixels = preprocess(await imageOf(source), metadata.preprocessing);
    const image = new Tensor("uint8", pixels, [1, height, width, 3]);
    const { feature } = await guarded(() => session.run({ image }, ["feature"]));
    const values = /** @type {Float32Array} */ (feature.data);
    if (values.length !== metadata.feature_size) throw new RefusedFile("features of another shape");
    if (!values.every(Number.isFinite)) throw new UnusableImage("the backbone gives no finite feature");
    return values.slice();
  },

  /** @param {string} digest @param {Blob} file @param {Expected} here @returns {Promise<{threshold: number | null}>} */
  async openHead(digest, file, here) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const metadata = headMetadata(readOnnx(bytes, { maxBytes: MAX_HEAD_BYTES }));
    refuseForeignHead(metadata, here);
    const session = await opened(bytes);
    const { length } = here.classes;
    refuseSignature(session, { feature: `float32 n,${here.featureSize}` }, { probabilities: `float32 n,${length}` });
    heads.set(digest, { session, metadata });
    try {
      await probe(digest, here.featureSize);
    } catch (error) {
      heads.delete(digest);
      throw error;
    }
    return { threshold: metadata.novelty_threshold };
  },

  /**
   * @param {string} digest of an open head
   * @param {Float32Array[]} features
   * @returns {Promise<{probabilities: Float32Array, novelty: number | null}[]>}
   */
  async runHead(digest, features) {
    if (!features.length) return [];
    const { session, metadata } = /** @type {any} */ (heads.get(digest));
    const [n, size, classes] = [features.length, metadata.feature_size, metadata.classes.length];
    const values = new Float32Array(n * size);
    features.forEach((each, at) => values.set(each, at * size));
    const hasNovelty = slots(session, "output").novelty === "float32 n";
    const feature = new Tensor("float32", values, [n, size]);
    const given = await guarded(() => session.run({ feature }, hasNovelty ? ["probabilities", "novelty"] : ["probabilities"]));
    const [all, novelty] = [given.probabilities.data, given.novelty?.data];
    if (all.length !== n * classes || !all.every(Number.isFinite)) throw new RefusedFile("the head gives no finite number for each class");
    if (novelty && (novelty.length !== n || !novelty.every(Number.isFinite))) throw new RefusedFile("the head gives no finite novelty");
    return features.map((_, at) => ({ probabilities: all.slice(at * classes, (at + 1) * classes), novelty: novelty ? novelty[at] : null }));
  },

  /** Close all graphs but these. @param {string[]} digests */
  async keep(digests) {
    for (const graphs of [backbones, heads]) {
      for (const [digest, { session }] of graphs) {
        if (digests.includes(digest)) continue;
        graphs.delete(digest);
        await session.release();
      }
    }
  },
};

/** Refuse a head that does not give probabilities, for zeros and for features of both signs. @param {string} digest @param {number} size */
async function probe(digest, size) {
  const answers = await CALLS.runHead(digest, [new Float32Array(size), Float32Array.from({ length: size }, (_, at) => 2 * Math.sin((at + 1) ** 2))]);
  for (const { probabilities } of answers) {
    const total = probabilities.reduce((sum, value) => sum + value, 0);
    if (Math.abs(total - 1) > SUM_TOLERANCE) throw new RefusedFile("the head's numbers are no probabilities");
  }
}

/** @typedef {typeof CALLS} Calls */

/** One call at a time. @type {Promise<void>} */
let last = Promise.resolve();

/** The worker's own scope. @type {Pick<Worker, "onmessage" | "postMessage">} */
const scope = /** @type {any} */ (self);

/** @param {MessageEvent<{id: number, name: keyof Calls, parts: any[]}>} event */
scope.onmessage = ({ data: { id, name, parts } }) => {
  last = last.then(async () => {
    try {
      scope.postMessage({ id, result: await /** @type {any} */ (CALLS[name])(...parts) });
    } catch (error) {
      const { message, constructor } = /** @type {Error} */ (error);
      scope.postMessage({ id, error: { kind: constructor.name, message } });
    }
  });
};
