// @ts-check
/** The messages of docs/wire-fields.md, but for those between the aggregator and a second operator. */

import { decode as decodeValue, encode as encodeValue, malformed, RefusedMessage } from "./msgpack.js";
import { absent, bytes, float, int, list, long, map, nilable, oneOf, optional, pair, struct, text, tuple } from "./types.js";

export const PROTOCOL_VERSION = 1;
export const MAX_CHUNK_BYTES = 61_440;
export const MAX_FRAME_BYTES = 62_464;
export const MAX_MANIFEST_BYTES = 122_880;
export const MAX_SIGNED_BYTES = 177_152;
export const MAX_BLOB_BYTES = 2 ** 31;
export const CONFIDENCE_BINS = 32;

const Name = text(1, 64, /^[A-Za-z0-9_-]{1,64}$/);
const Text = text(0, 256);
const ClassName = text(1, 128);
const TensorName = text(1, 64, /^[a-z][a-z0-9_]{0,63}$/);
const Digest = bytes(32, 32);
const PublicKey = bytes(32, 32);
const Signature = bytes(64, 64);
const Natural = long(0n, 2n ** 63n - 1n);
const Positive = long(1n, 2n ** 63n - 1n);
const ByteCount = int(0, MAX_BLOB_BYTES);
const Images = int(0, 10_000_000);
const ClassIndex = int(0, 4095);
const Short = int(1, 65_535);
const PerClass = list(Images, 0, 4096);
const PerBin = list(Images, CONFIDENCE_BINS, CONFIDENCE_BINS);
const Figure = float((value) => Math.abs(value) <= 1e30);
const Epsilon = float((value) => value >= 0 && value <= 1_000_000);
const Fraction = float((value) => value > 0 && value < 1);
const Multiplier = float((value) => value > 0 && value <= 1_000_000);
const noBytes = () => new Uint8Array();
const noText = () => "";

const ITEM_BYTES = { f2: 2, f4: 4, u1: 1, u2: 2, u4: 4, i1: 1, i4: 4 };

const TensorFields = tuple({
  dtype: oneOf("f2", "f4", "u1", "u2", "u4", "i1", "i4"),
  shape: list(int(0, 2 ** 31 - 1), 0, 4),
  data: bytes(0, MAX_BLOB_BYTES),
});
/** @typedef {import("./types.js").Value<typeof TensorFields>} Tensor */
/** @type {import("./types.js").Type<Tensor>} */
const Tensor = {
  read(value) {
    const tensor = TensorFields.read(value);
    const size = tensor.shape.reduce((product, edge) => product * edge, ITEM_BYTES[tensor.dtype]);
    if (tensor.data.length !== size) throw malformed("the data of a tensor do not fit its shape");
    return tensor;
  },
  write: TensorFields.write,
};
const TensorMap = map(TensorName, Tensor, 64);

const BlobRef = struct({ digest: Digest, size_bytes: int(1, MAX_BLOB_BYTES), name: Text });

const KeyCertificate = struct({
  number: Positive, key: PublicKey, root: optional(bytes(0, 32), noBytes), signer: PublicKey, signature: Signature,
});

const Program = struct({
  init: BlobRef, step: BlobRef, project: BlobRef, head: BlobRef,
  persistent: list(TensorName, 0, 64), uploaded: list(TensorName, 0, 64), batch_size: Short,
});

const SecondOperator = struct({
  seal_key: PublicKey, seal_key_signature: Signature, sign_key: PublicKey, aggregator_key: PublicKey,
  min_devices: int(2, 1_000_000), honest: int(1, 1_000_000),
});

const Statistics = struct({ map: BlobRef, size: int(1, 4096), second_operator: absent(SecondOperator) });

const Perturbation = struct({
  on: oneOf("prototypes", "images"),
  noise: optional(oneOf("gaussian", "laplace"), () => /** @type {const} */ ("gaussian")),
  scale: Multiplier,
  shrink: optional(float((value) => value >= 0 && value < 1), () => 0),
});

const DifferentialPrivacy = struct({
  noise_multiplier: Multiplier, delta: Fraction, max_epsilon: Multiplier,
  images_per_person: absent(int(1, 1000)), person_level: absent(int(1, 16)),
});

const HeadRef = struct({
  version: Positive, head: BlobRef, devices: Positive, prototypes: Positive,
  metrics: optional(map(Text, Figure, 32), () => ({})), round: nilable(Natural), tensors: nilable(BlobRef),
});

const Privacy = struct({ epsilon: Epsilon, total_epsilon: Epsilon, delta: Fraction, releases: Positive });

const SealedMask = struct({ sealed: bytes(80, 80), min_devices: int(2, 1_000_000), key: PublicKey, signature: Signature });

const Block = struct({ means: Tensor, labels: Tensor, counts: Tensor, rows: Tensor, diagonal: Tensor, scales: Tensor });

const Confused = tuple({ label: ClassIndex, predicted: ClassIndex, images: int(1, 10_000_000) });

export const Released = tuple({
  noise_multiplier: Multiplier, honest: int(0, 1_000_000), times: int(1, 100_000),
  images_per_person: optional(int(0, 1000), () => 0),
});

const Reason = oneOf(
  "malformed", "version", "oversized", "shape", "dtype", "not_finite", "unknown_class", "unknown_device", "unknown_task",
  "unknown_head", "unknown_blob", "digest", "superseded", "late", "unknown_round", "no_space", "signature", "revoked",
  "replayed", "implausible", "rate_limited", "quota",
);

const MESSAGES = {
  tensors: struct({ values: TensorMap }),
  signed: struct({
    key: PublicKey, release: Positive, issued_s: Natural, expires_s: Natural, signature: Signature,
    body: bytes(0, MAX_MANIFEST_BYTES), certificates: optional(list(KeyCertificate, 0, 256), () => []),
  }),
  task: struct({
    fleet: Name, algorithm: Name, classes: list(ClassName, 1, 4096), backbones: list(BlobRef, 1, 16),
    alpha: float((value) => value > 0 && value <= 1), batch_size: Short, min_images: Short, seed: Natural,
    program: nilable(Program), statistics: nilable(Statistics), perturbation: nilable(Perturbation),
    differential_privacy: nilable(DifferentialPrivacy), columns: absent(list(pair(Natural, Positive), 1, 256)),
    prototypes: absent(oneOf("auto")), continues: absent(list(Digest, 1, 16)),
  }),
  round: struct({ task: Digest, number: Natural, rounds: Positive, epochs: int(0, 65_535), tensors: BlobRef }),
  head: struct({
    task: Digest, current: HeadRef, candidate: nilable(HeadRef), canary_rank_limit: optional(int(0, 2 ** 32), () => 0),
  }),
  presence: struct({
    state: oneOf("online", "stopped", "offline", "replaced"), epoch: Natural,
    instance: optional(bytes(0, 16), noBytes), address: optional(Text, noText),
    key: optional(bytes(0, 32), noBytes), signature: optional(bytes(0, 64), noBytes),
  }),
  info: struct({
    epoch: Natural, software: Text, runtime: Text, backbones: list(Digest, 0, 64), images: map(ClassName, Images, 4096),
    unusable_images: Images, problem: optional(Text, noText), warning: optional(Text, noText),
    head_version: optional(Natural, () => 0), refused_messages: optional(map(Text, Natural, 32), () => ({})),
    drift: absent(Figure),
  }),
  submission: struct({
    task: Digest, sequence: Natural, prototypes: Tensor, labels: Tensor, counts: Tensor, images: Images,
    omitted_classes: optional(list(ClassIndex, 0, 4096), () => []), round: optional(Natural, () => 0),
    tensors: optional(TensorMap, () => ({})), loss: nilable(float((value) => Math.abs(value) <= 1_000_000)),
    privacy: nilable(Privacy), mask: absent(SealedMask), block: absent(Block),
  }),
  evaluation: struct({
    task: Digest, head_version: Positive, correct: PerClass, incorrect: PerClass,
    previous_correct: optional(PerClass, () => []), problem: optional(Text, noText), correct_with_prior: absent(Images),
    confidence_correct: absent(PerBin), confidence_images: absent(PerBin), novelty_images: absent(PerBin),
    confused: absent(list(Confused, 0, 1024)),
  }),
  frame: tuple({
    v: int(0, 65_535), digest: Digest, size_bytes: ByteCount, offset: ByteCount, data: bytes(0, MAX_CHUNK_BYTES),
    key: optional(bytes(0, 32), noBytes), signature: optional(bytes(0, 64), noBytes),
  }),
  receipt: struct({
    digest: Digest, status: oneOf("received", "missing", "refused"),
    missing: optional(list(pair(ByteCount, ByteCount), 0, 64), () => []), reason: nilable(Reason),
    detail: optional(Text, noText), sequence: optional(long(0n, 2n ** 62n), () => 0),
  }),
  privacy_record: struct({
    releases: list(Released, 0, 1024), key: optional(bytes(0, 32), noBytes), signature: optional(bytes(0, 64), noBytes),
  }),
  get: struct({ digest: Digest, offset: ByteCount, length: int(1, 983_040) }),
};

/** @typedef {typeof MESSAGES} Messages */
/** @typedef {keyof Messages} MessageType */
/**
 * @template {MessageType} T
 * @typedef {import("./types.js").Value<Messages[T]>} Message
 */

/** The most bytes of a message; payloads of frames have the limit of blobs. @type {Partial<Record<MessageType, number>>} */
const MAX_BYTES = {
  frame: MAX_FRAME_BYTES,
  signed: MAX_SIGNED_BYTES,
  submission: MAX_BLOB_BYTES,
  evaluation: MAX_BLOB_BYTES,
  tensors: MAX_BLOB_BYTES,
};

/**
 * Decode a message of a type, with all defaults filled in; absent fields are undefined.
 * @template {MessageType} T
 * @param {T} type
 * @param {Uint8Array} data
 * @returns {Message<T>}
 * @throws {RefusedMessage} with the reason `malformed` or `version`
 */
export function decodeMessage(type, data) {
  if (data.length > (MAX_BYTES[type] ?? MAX_MANIFEST_BYTES)) throw malformed("too many bytes");
  const value = decodeValue(data);
  const isArray = type === "frame";
  if (isArray ? !Array.isArray(value) : !(value instanceof Map)) throw malformed(`expected a ${type}`);
  const [tag, version, fields] = Array.isArray(value)
    ? [value[0], value[1], value.slice(1)]
    : [/** @type {Map<string, unknown>} */ (value).get("type"), /** @type {Map<string, unknown>} */ (value).get("v"), value];
  if (tag !== type) throw malformed(`expected a ${type}`);
  if (int(0, 65_535).read(version) !== PROTOCOL_VERSION) throw new RefusedMessage("version", `version ${version}`);
  return /** @type {Message<T>} */ (MESSAGES[type].read(fields));
}

/**
 * Encode a message.
 * @template {MessageType} T
 * @param {T} type
 * @param {Omit<Message<T>, "v">} message
 * @returns {Uint8Array}
 */
export function encodeMessage(type, message) {
  const written = /** @type {import("./types.js").Type<any>} */ (MESSAGES[type]).write({ ...message, v: PROTOCOL_VERSION });
  if (Array.isArray(written)) return encodeValue([type, ...written]);
  return encodeValue(new Map([["type", type], ["v", PROTOCOL_VERSION], .../** @type {Map<string, unknown>} */ (written)]));
}
