// @ts-check
/**
 * msgpack, as the protocol uses it: nil, booleans, integers, floats, text, bytes, arrays, and maps with text keys.
 *
 * Not a library from npm: those return 1 and 1.0 as the same number, so that a reader cannot refuse a float in place of
 * an integer, and write 2.0 as an integer, where signed records need a float of 64 bits. They also accept text that is not UTF-8.
 */

/** The protocol nests less deep than this. */
const MAX_DEPTH = 16;

/** A number that was, or is to be, encoded as a float. */
export class Float {
  /** @param {number} value */
  constructor(value) {
    this.value = value;
  }
}

/** Bytes that are no message of this protocol, or of another version. */
export class RefusedMessage extends Error {
  /**
   * @param {string} reason a word of docs/wire-fields.md#reasons
   * @param {string} detail
   */
  constructor(reason, detail) {
    super(`${reason}: ${detail}`);
    this.reason = reason;
  }
}

/** @param {string} detail */
export const malformed = (detail) => new RefusedMessage("malformed", detail);

/**
 * An integer as a number where a number has it exactly, else as a bigint.
 * @param {bigint} value
 * @returns {number | bigint}
 */
export function integer(value) {
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value;
}

/**
 * Decode one value: integers as number or bigint, floats as `Float`, maps as `Map`. Bytes are views of `bytes`.
 * @param {Uint8Array} bytes
 * @returns {unknown}
 * @throws {RefusedMessage} if the bytes are not one value with nothing after it
 */
export function decode(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  let at = 0;

  /** @param {number} count */
  function skip(count) {
    const start = at;
    if (count > bytes.length - start) throw malformed("the message is cut off");
    at += count;
    return start;
  }
  /** @param {1 | 2 | 4} width */
  function length(width) {
    const start = skip(width);
    return width === 1 ? view.getUint8(start) : width === 2 ? view.getUint16(start) : view.getUint32(start);
  }
  /** @param {number} count */
  function binary(count) {
    const start = skip(count);
    return bytes.subarray(start, start + count);
  }
  /** @param {number} count */
  function text(count) {
    const data = binary(count);
    try {
      return utf8.decode(data);
    } catch {
      throw malformed("text is not UTF-8");
    }
  }
  /** @param {number} count @param {number} depth */
  function array(count, depth) {
    if (depth >= MAX_DEPTH) throw malformed("nested too deep");
    /** @type {unknown[]} */
    const items = [];
    for (let each = 0; each < count; each += 1) items.push(value(depth + 1));
    return items;
  }
  /** @param {number} count @param {number} depth */
  function map(count, depth) {
    if (depth >= MAX_DEPTH) throw malformed("nested too deep");
    /** @type {Map<string, unknown>} */
    const entries = new Map();
    for (let each = 0; each < count; each += 1) {
      const key = value(depth + 1);
      if (typeof key !== "string") throw malformed("the key of a map is not text");
      entries.set(key, value(depth + 1));
    }
    return entries;
  }
  /** @param {number} depth @returns {unknown} */
  function value(depth) {
    const first = view.getUint8(skip(1));
    if (first < 0x80) return first;
    if (first < 0x90) return map(first & 0x0f, depth);
    if (first < 0xa0) return array(first & 0x0f, depth);
    if (first < 0xc0) return text(first & 0x1f);
    if (first >= 0xe0) return first - 256;
    switch (first) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return binary(length(1));
      case 0xc5: return binary(length(2));
      case 0xc6: return binary(length(4));
      case 0xca: return new Float(view.getFloat32(skip(4)));
      case 0xcb: return new Float(view.getFloat64(skip(8)));
      case 0xcc: return view.getUint8(skip(1));
      case 0xcd: return view.getUint16(skip(2));
      case 0xce: return view.getUint32(skip(4));
      case 0xcf: return integer(view.getBigUint64(skip(8)));
      case 0xd0: return view.getInt8(skip(1));
      case 0xd1: return view.getInt16(skip(2));
      case 0xd2: return view.getInt32(skip(4));
      case 0xd3: return integer(view.getBigInt64(skip(8)));
      case 0xd9: return text(length(1));
      case 0xda: return text(length(2));
      case 0xdb: return text(length(4));
      case 0xdc: return array(length(2), depth);
      case 0xdd: return array(length(4), depth);
      case 0xde: return map(length(2), depth);
      case 0xdf: return map(length(4), depth);
      default: throw malformed("a type of msgpack that the protocol does not use");
    }
  }

  const result = value(1);
  if (at !== bytes.length) throw malformed("bytes follow the message");
  return result;
}

/**
 * Encode a value: numbers and bigints as the shortest integers, `Float` as 64 bits.
 * @param {unknown} value
 * @returns {Uint8Array}
 * @throws {TypeError} if it is of another type, or a number is no integer
 */
export function encode(value) {
  let buffer = new Uint8Array(256);
  let view = new DataView(buffer.buffer);
  let at = 0;

  /** @param {number} count */
  function grow(count) {
    const start = at;
    at += count;
    if (at > buffer.length) {
      const larger = new Uint8Array(Math.max(at, 2 * buffer.length));
      larger.set(buffer);
      buffer = larger;
      view = new DataView(buffer.buffer);
    }
    return start;
  }
  /** @param {number} code */
  function byte(code) {
    const start = grow(1); // which may replace the view
    view.setUint8(start, code);
  }
  /** @param {number} code @param {1 | 2 | 4} width @param {number} number */
  function head(code, width, number) {
    const start = grow(1 + width);
    view.setUint8(start, code);
    if (width === 1) view.setUint8(start + 1, number);
    else if (width === 2) view.setUint16(start + 1, number);
    else view.setUint32(start + 1, number);
  }
  /** @param {Uint8Array} data */
  function put(data) {
    const start = grow(data.length);
    buffer.set(data, start);
  }
  /** @param {number | bigint} number */
  function whole(number) {
    if (number >= 0) {
      if (number < 0x80) byte(Number(number));
      else if (number < 0x100) head(0xcc, 1, Number(number));
      else if (number < 0x10000) head(0xcd, 2, Number(number));
      else if (number < 0x100000000) head(0xce, 4, Number(number));
      else {
        const start = grow(9);
        view.setUint8(start, 0xcf);
        view.setBigUint64(start + 1, BigInt(number));
      }
    } else if (number >= -32) byte(Number(number));
    else if (number >= -0x80) head(0xd0, 1, Number(number));
    else if (number >= -0x8000) head(0xd1, 2, Number(number));
    else if (number >= -0x80000000) head(0xd2, 4, Number(number));
    else {
      const start = grow(9);
      view.setUint8(start, 0xd3);
      view.setBigInt64(start + 1, BigInt(number));
    }
  }
  /** @param {unknown} each */
  function write(each) {
    if (each === null) byte(0xc0);
    else if (typeof each === "boolean") byte(each ? 0xc3 : 0xc2);
    else if (typeof each === "bigint" || Number.isSafeInteger(each)) whole(/** @type {number | bigint} */ (each));
    else if (each instanceof Float) {
      const start = grow(9);
      view.setUint8(start, 0xcb);
      view.setFloat64(start + 1, each.value);
    } else if (typeof each === "string") {
      const data = new TextEncoder().encode(each);
      if (data.length < 32) byte(0xa0 | data.length);
      else if (data.length < 0x100) head(0xd9, 1, data.length);
      else if (data.length < 0x10000) head(0xda, 2, data.length);
      else head(0xdb, 4, data.length);
      put(data);
    } else if (each instanceof Uint8Array) {
      if (each.length < 0x100) head(0xc4, 1, each.length);
      else if (each.length < 0x10000) head(0xc5, 2, each.length);
      else head(0xc6, 4, each.length);
      put(each);
    } else if (Array.isArray(each)) {
      if (each.length < 16) byte(0x90 | each.length);
      else if (each.length < 0x10000) head(0xdc, 2, each.length);
      else head(0xdd, 4, each.length);
      each.forEach(write);
    } else if (each instanceof Map) {
      if (each.size < 16) byte(0x80 | each.size);
      else if (each.size < 0x10000) head(0xde, 2, each.size);
      else head(0xdf, 4, each.size);
      for (const [key, item] of each) {
        write(key);
        write(item);
      }
    } else throw new TypeError(`cannot encode ${typeof each} ${String(each)}`);
  }

  write(value);
  return buffer.slice(0, at);
}
