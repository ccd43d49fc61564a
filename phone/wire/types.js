// @ts-check
/** Types of fields: each reads a decoded value, and refuses one of another type or out of its bounds. */

import { Float, malformed } from "./msgpack.js";

/**
 * @template T
 * @typedef {object} Type
 * @property {(value: unknown) => T} read throws RefusedMessage
 * @property {(value: T) => unknown} write a value for `encode` of msgpack
 * @property {() => T} [fallback] the default, if the field may be left out
 */
/** @typedef {number | bigint} Integer a number where a number has it exactly */
/**
 * @template T
 * @typedef {T extends Type<infer V> ? V : never} Value
 */
/** @typedef {Record<string, Type<any>>} Fields */
/**
 * @template {Fields} F
 * @typedef {{[K in keyof F]: Value<F[K]>}} Struct
 */

/**
 * An integer that a number has exactly.
 * @param {number} low
 * @param {number} high
 * @returns {Type<number>}
 */
export function int(low, high) {
  return {
    read(value) {
      if (typeof value !== "number" || value < low || value > high) throw malformed(`expected an integer from ${low} to ${high}`);
      return value;
    },
    write: (value) => value,
  };
}

/**
 * An integer of up to 64 bits.
 * @param {bigint} low
 * @param {bigint} high
 * @returns {Type<Integer>}
 */
export function long(low, high) {
  return {
    read(value) {
      if ((typeof value !== "number" && typeof value !== "bigint") || value < low || value > high) {
        throw malformed(`expected an integer from ${low} to ${high}`);
      }
      return value;
    },
    write: (value) => value,
  };
}

/**
 * A finite float for which `holds`; an integer is one as well.
 * @param {(value: number) => boolean} holds
 * @returns {Type<number>}
 */
export function float(holds) {
  return {
    read(value) {
      const number = value instanceof Float ? value.value : typeof value === "bigint" ? Number(value) : value;
      if (typeof number !== "number" || !Number.isFinite(number) || !holds(number)) throw malformed("expected a float within its bounds");
      return number;
    },
    write: (value) => new Float(value),
  };
}

/**
 * @param {number} low
 * @param {number} high the most bytes
 * @returns {Type<Uint8Array>}
 */
export function bytes(low, high) {
  return {
    read(value) {
      if (!(value instanceof Uint8Array) || value.length < low || value.length > high) throw malformed(`expected ${low} to ${high} bytes`);
      return value;
    },
    write: (value) => value,
  };
}

/**
 * Text of `low` to `high` characters (Unicode code points), or of a pattern.
 * @param {number} low
 * @param {number} high
 * @param {RegExp} [pattern]
 * @returns {Type<string>}
 */
export function text(low, high, pattern) {
  return {
    read(value) {
      if (typeof value !== "string") throw malformed("expected text");
      // A character has at most two units of UTF-16.
      const count = value.length > 2 * high ? value.length : [...value].length;
      if (count < low || count > high || (pattern && !pattern.test(value))) throw malformed("text out of its bounds");
      return value;
    },
    write: (value) => value,
  };
}

/**
 * @template {string} T
 * @param {T[]} words
 * @returns {Type<T>}
 */
export function oneOf(...words) {
  return {
    read(value) {
      const word = words.find((each) => each === value);
      if (word === undefined) throw malformed(`expected one of ${words.join(", ")}`);
      return word;
    },
    write: (value) => value,
  };
}

/**
 * @template T
 * @param {Type<T>} type
 * @param {number} low
 * @param {number} high
 * @returns {Type<T[]>}
 */
export function list(type, low, high) {
  return {
    read(value) {
      if (!Array.isArray(value) || value.length < low || value.length > high) throw malformed(`expected ${low} to ${high} items`);
      return value.map(type.read);
    },
    write: (value) => value.map(type.write),
  };
}

/**
 * @template A
 * @template B
 * @param {Type<A>} first
 * @param {Type<B>} second
 * @returns {Type<[A, B]>}
 */
export function pair(first, second) {
  return {
    read(value) {
      if (!Array.isArray(value) || value.length !== 2) throw malformed("expected two items");
      return [first.read(value[0]), second.read(value[1])];
    },
    write: (value) => [first.write(value[0]), second.write(value[1])],
  };
}

/**
 * @template T
 * @param {Type<string>} key
 * @param {Type<T>} type
 * @param {number} high the most entries
 * @returns {Type<Record<string, T>>}
 */
export function map(key, type, high) {
  return {
    read(value) {
      if (!(value instanceof Map) || value.size > high) throw malformed(`expected a map of at most ${high} items`);
      // An own property, also where the key is __proto__.
      return Object.fromEntries([...value].map(([name, each]) => [key.read(name), type.read(each)]));
    },
    write: (value) => new Map(Object.entries(value).map(([name, each]) => [name, type.write(each)])),
  };
}

/**
 * @template T
 * @param {Type<T>} type
 * @returns {Type<T | null>}
 */
export function orNil(type) {
  return {
    read: (value) => (value === null ? null : type.read(value)),
    write: (value) => (value === null ? null : type.write(value)),
  };
}

/**
 * A field that may be left out.
 * @template T
 * @param {Type<T>} type
 * @param {() => NoInfer<T>} fallback
 * @returns {Type<T>}
 */
export const optional = (type, fallback) => ({ ...type, fallback });

/**
 * A field that may be nil, and left out.
 * @template T
 * @param {Type<T>} type
 * @returns {Type<T | null>}
 */
export const nilable = (type) => optional(orNil(type), () => null);

/**
 * A field that may be absent, and is never nil.
 * @template T
 * @param {Type<T>} type
 * @returns {Type<T | undefined>}
 */
export const absent = (type) => ({
  read: type.read,
  write: (value) => (value === undefined ? undefined : type.write(value)),
  fallback: () => undefined,
});

/**
 * A map of fields. Unknown keys are ignored.
 * @template {Fields} F
 * @param {F} fields
 * @returns {Type<Struct<F>>}
 */
export function struct(fields) {
  return {
    read(value) {
      if (!(value instanceof Map)) throw malformed("expected a map");
      return /** @type {Struct<F>} */ (Object.fromEntries(Object.entries(fields).map(([name, type]) => {
        if (value.has(name)) return [name, type.read(value.get(name))];
        if (!type.fallback) throw malformed(`without ${name}`);
        return [name, type.fallback()];
      })));
    },
    write: (value) => new Map(Object.entries(fields)
      .map(([name, type]) => /** @type {const} */ ([name, type.write(value[name])]))
      .filter(([, each]) => each !== undefined)),
  };
}

/**
 * An array of fields in their order. Items after the last one are ignored.
 * @template {Fields} F
 * @param {F} fields
 * @returns {Type<Struct<F>>}
 */
export function tuple(fields) {
  return {
    read(value) {
      if (!Array.isArray(value)) throw malformed("expected an array");
      return /** @type {Struct<F>} */ (Object.fromEntries(Object.entries(fields).map(([name, type], at) => {
        if (at < value.length) return [name, type.read(value[at])];
        if (!type.fallback) throw malformed(`without ${name}`);
        return [name, type.fallback()];
      })));
    },
    write: (value) => Object.entries(fields).map(([name, type]) => type.write(value[name])),
  };
}
