/** Answers calls of the pure modules: JSON on standard input to JSON on standard output, for a comparison with Python. */

import { readFileSync } from "node:fs";

import { backboneMetadata, headMetadata } from "../core/metadata.js";
import { readOnnx, RefusedFile } from "../core/onnx_file.js";
import { adjusted, choosePrior, labelShares } from "../core/prior.js";
import { encodeEvaluation } from "../device/evaluation.js";

const bytes = (text) => new Uint8Array(Buffer.from(text, "base64"));

/** The result, or `refused` with the reason. */
function guarded(run) {
  try {
    return run();
  } catch (error) {
    if (!(error instanceof RefusedFile)) throw error;
    return { refused: error.message };
  }
}

const CALLS = {
  onnx: ({ file, maxBytes, isDeterministic }) => guarded(() => readOnnx(bytes(file), { maxBytes, isDeterministic })),
  backbone: ({ text }) => guarded(() => backboneMetadata(text)),
  head: ({ text }) => guarded(() => headMetadata(text)),
  prior({ rows, counts }) {
    const shares = choosePrior(rows.map((row) => Float32Array.from(row)), labelShares(counts));
    return { shares, adjusted: rows.map((row) => [...adjusted(Float32Array.from(row), shares)]) };
  },
  evaluation({ classes, answers, previous, labels }) {
    const made = answers.map((each) => ({ ...each, probabilities: Float32Array.from(each.probabilities) }));
    return Buffer.from(encodeEvaluation({ task: new Uint8Array(32), version: 1, classes }, made, previous, labels)).toString("base64");
  },
};

const calls = JSON.parse(readFileSync(0, "utf-8"));
console.log(JSON.stringify(calls.map(([name, fields]) => CALLS[name](fields))));
