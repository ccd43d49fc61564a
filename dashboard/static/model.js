// The fleet's model in the browser: model.onnx run by ONNX Runtime Web. Nothing is uploaded.

import { request } from "./fleet.js";

const vendor = new URL("vendor/", import.meta.url).href;

let runtime = null;
let loaded = { version: null, model: null };

async function openRuntime() {
  const ort = await import("./vendor/ort.wasm.min.mjs");
  ort.env.wasm.wasmPaths = vendor;
  ort.env.wasm.numThreads = 1;
  return ort;
}

/** Return the class probabilities of an image file, most probable first. `version` names the model on the server. */
export async function predict(file, version) {
  runtime ??= openRuntime();
  const ort = await runtime;
  if (loaded.version !== version) loaded = { version, model: openModel(ort) };
  let model;
  try {
    model = await loaded.model;
  } catch (error) {
    loaded = { version: null, model: null };
    throw error;
  }
  const photo = await createImageBitmap(file, { imageOrientation: "none" });
  const inputs = {};
  for (const [name, backbone] of Object.entries(model.metadata.backbones)) {
    const { width, height } = backbone.preprocessing;
    inputs[name] = new ort.Tensor("uint8", pixels(photo, backbone.preprocessing), [1, height, width, 3]);
  }
  const { probabilities } = await model.session.run(inputs, ["probabilities"]);
  return model.metadata.head.classes
    .map((name, label) => ({ name, probability: probabilities.data[label] }))
    .sort((one, other) => other.probability - one.probability);
}

async function openModel(ort) {
  const response = await request("api/v1/files/model.onnx");
  if (!response.ok) throw new Error((await response.json()).error);
  const bytes = new Uint8Array(await response.arrayBuffer());
  const metadata = JSON.parse(propertyOf(bytes, "protofleet"));
  return { metadata, session: await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] }) };
}

const MODES = { center: Math.max, border: Math.min, squash: (edge) => edge };

/** Return the image (height, width, 3) of a photo, resized and cropped as the backbone's metadata says. */
function pixels(photo, to) {
  const [wide, high] = [Math.floor(to.width / to.crop_pct), Math.floor(to.height / to.crop_pct)];
  const fit = MODES[to.crop_mode];
  const width = fit(wide, Math.floor((photo.width * high) / photo.height));
  const height = fit(high, Math.floor((photo.height * wide) / photo.width));
  const canvas = new OffscreenCanvas(to.width, to.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = `rgb(${to.fill.join(" ")})`;
  context.fillRect(0, 0, to.width, to.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(photo, Math.round((to.width - width) / 2), Math.round((to.height - height) / 2), width, height);
  const { data } = context.getImageData(0, 0, to.width, to.height);
  const image = new Uint8Array(to.width * to.height * 3);
  for (let pixel = 0; pixel < to.width * to.height; pixel += 1) {
    image.set(data.subarray(4 * pixel, 4 * pixel + 3), 3 * pixel);
  }
  return image;
}

const METADATA_FIELD = 14;

/** Return a property of an ONNX file, which ONNX Runtime Web does not return: of the protobuf message ModelProto. */
export function propertyOf(bytes, key) {
  const text = new TextDecoder();
  for (const [field, value] of fieldsOf(bytes)) {
    if (field !== METADATA_FIELD) continue;
    const entry = Object.fromEntries([...fieldsOf(value)].map(([number, part]) => [number, text.decode(part)]));
    if (entry[1] === key) return entry[2];
  }
  throw new Error(`model.onnx has no property ${key}`);
}

/** Yield number and bytes of each length-delimited field of a protobuf message. */
function* fieldsOf(bytes) {
  let place = 0;
  const number = () => {
    let value = 0;
    for (let factor = 1; place < bytes.length; factor *= 128) {
      const byte = bytes[place++];
      value += (byte & 127) * factor;
      if (byte < 128) return value;
    }
    throw new Error("model.onnx is damaged");
  };
  while (place < bytes.length) {
    const tag = number();
    const kind = tag % 8;
    if (kind === 2) {
      const size = number();
      yield [(tag - kind) / 8, bytes.subarray(place, place + size)];
      place += size;
    } else if (kind === 0) number();
    else if (kind === 1 || kind === 5) place += kind === 1 ? 8 : 4;
    else throw new Error("model.onnx is damaged");
  }
}
