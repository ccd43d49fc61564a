// @ts-check
/**
 * ONNX files, validated before ONNX Runtime loads them, and their metadata, which ONNX Runtime Web does not return.
 *
 * Every occurrence of a field counts, even where a reader would overwrite it with a later one.
 */

/** A file that the device does not run. */
export class RefusedFile extends Error {}

/** Limits: fields of a file, nested messages, and fields of a property, which has two. */
const MAX_FIELDS = 2 ** 18;
const MAX_DEPTH = 100;
const MAX_ENTRY_FIELDS = 16;
const PROPERTY = "protofleet";

const FORBIDDEN = { external: "tensors in other files", sparse: "sparse tensors" };
const RANDOM = ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"];

/** The fields of ONNX's messages, by number, that lead to operators or tensors. @type {Record<string, Record<number, string>>} */
const NESTED = {
  model: { 7: "graph", 8: "opset", 14: "entry", 20: "training", 25: "function" },
  graph: { 1: "node", 5: "tensor", 15: "sparse" },
  node: { 5: "attribute", 7: "domain" },
  attribute: { 5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse" },
  tensor: { 13: "external", 14: "external" },
  opset: { 1: "domain" },
  training: { 1: "graph", 2: "graph" },
  function: { 7: "node", 9: "opset", 10: "domain", 11: "attribute" },
};
/** Bytes of a value by the number of its type; of any other type 16. @type {Record<number, number>} */
const ITEM_BYTES = { 1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2 };

/** @typedef {{number: number, value: number | Uint8Array}} Field */

/**
 * Yield the fields of a protobuf message.
 * @param {Uint8Array} data
 * @returns {Generator<Field>}
 */
function* fieldsOf(data) {
  let at = 0;
  const varint = () => {
    let value = 0;
    for (let place = 0; place < 10 && at < data.length; place += 1) {
      const byte = data[at];
      at += 1;
      value += (byte & 127) * 2 ** (7 * place);
      if (byte < 128) return value;
    }
    throw new RefusedFile("not an ONNX file, or cut off");
  };
  while (at < data.length) {
    const tag = varint();
    const [number, encoding] = [Math.floor(tag / 8), tag % 8];
    if (!(tag > 0 && tag < 2 ** 32) || ![0, 1, 2, 5].includes(encoding)) throw new RefusedFile("not an ONNX file");
    if (encoding === 0) {
      yield { number, value: varint() };
      continue;
    }
    const size = encoding === 2 ? varint() : encoding === 1 ? 8 : 4;
    if (at + size > data.length) throw new RefusedFile("not an ONNX file, or cut off");
    yield { number, value: data.subarray(at, at + size) };
    at += size;
  }
}

/** @param {number | Uint8Array | undefined} value */
const textOf = (value) => (value instanceof Uint8Array ? new TextDecoder().decode(value) : "");

/**
 * Validate an ONNX file and return the JSON of its `protofleet` property.
 * @param {Uint8Array} file
 * @param {{maxBytes: number, isDeterministic?: boolean}} limits `isDeterministic` refuses random operators
 * @returns {string} empty if there is none
 * @throws {RefusedFile}
 */
export function readOnnx(file, { maxBytes, isDeterministic = false }) {
  if (file.length > maxBytes) throw new RefusedFile(`more than ${maxBytes} bytes`);
  let [property, seen, tensorBytes] = ["", 0, 0];
  const open = [{ message: "model", fields: fieldsOf(file) }];
  while (open.length) {
    const { message, fields } = open[open.length - 1];
    const { done, value: field } = fields.next();
    if (done) {
      open.pop();
      continue;
    }
    seen += 1;
    const kind = NESTED[message][field.number];
    const isEmpty = field.value instanceof Uint8Array ? !field.value.length : !field.value;
    if (!isEmpty && kind in FORBIDDEN) throw new RefusedFile(FORBIDDEN[/** @type {keyof typeof FORBIDDEN} */ (kind)]);
    if (!kind || !(field.value instanceof Uint8Array)) continue;
    if (kind === "domain") refuseDomain(textOf(field.value));
    else if (kind === "entry") property = ownProperty(field.value) ?? property;
    else {
      if (kind === "node" && isDeterministic) refuseRandom(field.value);
      if (kind === "tensor") tensorBytes += bytesOf(field.value);
      open.push({ message: kind, fields: fieldsOf(field.value) });
    }
    if (tensorBytes > maxBytes) throw new RefusedFile(`tensors of more than ${maxBytes} bytes`);
    if (seen > MAX_FIELDS || open.length > MAX_DEPTH) throw new RefusedFile("too many fields, or nested too deep");
  }
  return property;
}

/** @param {string} domain */
function refuseDomain(domain) {
  if (domain !== "" && domain !== "ai.onnx") throw new RefusedFile(`operators of ${domain.slice(0, 100)}`);
}

/** @param {Uint8Array} node */
function refuseRandom(node) {
  let [operators, inputs] = [/** @type {string[]} */ ([]), 0];
  for (const { number, value } of fieldsOf(node)) {
    if (number === 4) operators.push(textOf(value));
    if (number === 1) inputs += 1;
  }
  // A Dropout with a third input may be in training mode.
  const random = operators.find((name) => RANDOM.includes(name) || (name === "Dropout" && inputs >= 3));
  if (random) throw new RefusedFile(`the random operator ${random}`);
}

/** Return the bytes that a tensor takes in memory. @param {Uint8Array} tensor */
function bytesOf(tensor) {
  let [elements, itemBytes] = [1, 16];
  for (const { number, value } of fieldsOf(tensor)) {
    if (number === 1) {
      for (const length of typeof value === "number" ? [value] : packed(value)) elements = Math.min(elements * length, 2 ** 63);
    } else if (number === 2 && typeof value === "number") itemBytes = ITEM_BYTES[value] ?? 16;
  }
  return elements * itemBytes;
}

/** Return integers that are packed into one field. @param {Uint8Array} data */
function packed(data) {
  const values = [];
  let [value, place] = [0, 0];
  for (const byte of data.subarray(0, 320)) {
    value += (byte & 127) * 2 ** (7 * place);
    place += 1;
    if (byte < 128) {
      values.push(value);
      [value, place] = [0, 0];
    }
  }
  return values;
}

/** Return the value of a property if it is protofleet's. @param {Uint8Array} entry */
function ownProperty(entry) {
  const fields = [...fieldsOf(entry)];
  if (fields.length > MAX_ENTRY_FIELDS) throw new RefusedFile("a property of too many fields");
  const values = new Map(fields.map(({ number, value }) => [number, value]));
  return textOf(values.get(1)) === PROPERTY ? textOf(values.get(2)) : null;
}
