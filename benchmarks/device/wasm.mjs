/** Times in ONNX Runtime's WebAssembly with one thread, of the phone's modules too: in Node and in a browser. */

import { onWhite } from "../../phone/core/pixels.js";
import { preprocess } from "../../phone/core/preprocessing.js";

const isNode = typeof process !== "undefined";
const vendor = new URL("../../dashboard/static/vendor/", import.meta.url).href;

async function read(url) {
  if (!isNode) return new Uint8Array(await (await fetch(url)).arrayBuffer());
  const { readFile } = await import("node:fs/promises");
  return new Uint8Array(await readFile(new URL(url)));
}

async function openRuntime() {
  const ort = await import(`${vendor}ort.wasm.min.mjs`);
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = vendor;
  ort.env.wasm.wasmBinary = await read(`${vendor}ort-wasm-simd-threaded.wasm`);
  return ort;
}

/** Return the decoded pixels of an image file, RGBA. */
async function decode(bytes) {
  const bitmap = await createImageBitmap(new Blob([bytes]), { colorSpaceConversion: "none" });
  const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height).data;
}

/**
 * Return the milliseconds of each job in each turn, by name; photographs are for the first network.
 * @param {string} folder URL of the files that jobs.json names
 * @param {number} turns
 */
export async function measure(folder, turns) {
  const { networks, photos } = JSON.parse(new TextDecoder().decode(await read(`${folder}jobs.json`)));
  const ort = await openRuntime();
  const open = async (file) => ort.InferenceSession.create(await read(folder + file));
  const jobs = {};
  for (const [name, { preprocessing: to, feature_size: size }] of Object.entries(networks)) {
    const run = async (session, pixels) => {
      const { feature } = await session.run({ image: new ort.Tensor("uint8", pixels, [1, to.height, to.width, 3]) });
      return feature;
    };
    const pixels = Uint8Array.from({ length: to.height * to.width * 3 }, (_, at) => (at * 7919) % 256);
    const [float32, int8, head] = await Promise.all(["float32", "int8", "head"].map((part) => open(`${name}-${part}.onnx`)));
    jobs[`${name}, float32`] = () => run(float32, pixels);
    jobs[`${name}, int8`] = () => run(int8, pixels);
    jobs[`${name}, head`] = () => head.run({ feature: new ort.Tensor("float32", new Float32Array(size).fill(0.5), [1, size]) });
    if (name !== Object.keys(networks)[0]) continue;
    for (const { file, width, height } of photos) {
      const rgba = await read(`${folder}${file}.raw`);
      const prepared = () => preprocess({ data: onWhite(rgba), width, height }, to);
      jobs[`${name}, ${file}: preprocessing`] = prepared;
      jobs[`${name}, ${file}: features`] = () => run(float32, prepared());
      if (isNode) continue;
      const jpeg = await read(`${folder}${file}.jpg`);
      jobs[`${name}, ${file}: JPEG`] = () => decode(jpeg);
    }
  }
  return timed(jobs, turns);
}

/** Run all jobs in turns, the first of which does not count. */
async function timed(jobs, turns) {
  const times = Object.fromEntries(Object.keys(jobs).map((name) => [name, []]));
  for (let turn = 0; turn <= turns; turn += 1) {
    for (const [name, job] of Object.entries(jobs)) {
      const started = performance.now();
      await job();
      if (turn) times[name].push(performance.now() - started);
    }
  }
  return times;
}

if (isNode) console.log(JSON.stringify(await measure(process.argv[2], Number(process.argv[3]))));
