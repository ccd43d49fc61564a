import assert from "node:assert/strict";
import { test } from "node:test";

import { QUIET_S, START, step, unsupportedReason } from "../device/machine.js";
import { deviceState } from "../device/state.js";
import { unhex } from "./vectors.js";
import { Fleet, itemOf, payloadOf, refOf } from "./fleet.js";
import { digestOf } from "./reassembly.js";

const TASK = digestOf("task");
const backbone = payloadOf("backbone", 40_000);
const head = payloadOf("head", 7_001);
const submission = payloadOf("submission", 12_345);
const later = payloadOf("later", 30_000);
const evaluation = payloadOf("evaluation", 300);

const manifest = {
  fleet: "orchard", classes: ["a", "b"], backbones: [refOf(backbone, "backbone.onnx")], program: null, statistics: null,
  perturbation: null, differential_privacy: null,
};
const heads = (candidate = null) => ({
  task: unhex(TASK), current: { version: 1, head: refOf(head, "head.onnx") }, candidate, canary_rank_limit: 0,
});

/** A fleet whose device builds `items`, one after the other, and installs its head. */
function fleetOf({ seed = 0, faults = 0, items = [submission], reason = "" }) {
  const payloads = new Map([submission, later, evaluation].map((each) => [each.digest, each.payload]));
  const fleet = new Fleet({ seed, faults, blobs: [backbone, head], payloads });
  let builds = 0;
  fleet.build = ({ task, above }) => {
    fleet.above = above;
    const item = itemOf("submission", items[Math.min(builds++, items.length - 1)], task);
    fleet.later(() => fleet.event({ type: "built", task, item, failed: false }), 1);
  };
  fleet.install = ({ task, head: ref }) => {
    assert.deepEqual(ref.head.digest, unhex(head.digest));
    const report = itemOf("evaluation", evaluation, task, head.digest);
    fleet.later(() => fleet.event({ type: "installed", head: head.digest, report, reason }), 1);
  };
  fleet.event({ type: "task", digest: TASK, manifest });
  return fleet;
}

const taken = (fleet, payload) => fleet.hasAccepted({ digest: payload.digest });
const isIdle = ({ state }) => !state.uploads.length && !state.building && !state.installing && state.connected;

for (let seed = 0; seed < 60; seed += 1) {
  test(`lost, doubled and late messages, lost connections, restarts: ${seed}`, () => {
    const fleet = fleetOf({ seed, faults: 0.1 });
    fleet.run(() => fleet.state.received);
    fleet.event({ type: "head", manifest: heads(), isCanary: false });
    fleet.run(() => fleet.state.evaluated === head.digest && isIdle(fleet));
    assert.ok(taken(fleet, submission) && taken(fleet, evaluation));
    assert.deepEqual([...fleet.state.stored].sort(), [backbone.digest, head.digest].sort());
    assert.equal(fleet.state.installed, head.digest);
  });
}

test("without faults, each message is sent once", () => {
  const fleet = fleetOf({});
  fleet.run(() => isIdle(fleet) && fleet.state.received);
  const count = (type) => fleet.trace.filter((each) => each === type).length;
  assert.equal(count("request"), 1);
  assert.equal(count("send"), 3); // the query, 8 frames, the rest with the query
  assert.equal(count("build"), 1);
});

test("a new submission replaces one that is being uploaded", () => {
  const fleet = fleetOf({ items: [submission, later] });
  fleet.run(() => fleet.state.uploads.length);
  fleet.event({ type: "imagesChanged" });
  fleet.run(() => fleet.state.received?.digest === later.digest && isIdle(fleet));
  assert.ok(taken(fleet, later));
});

test("a submission is built once the images have not changed for a while", () => {
  const fleet = fleetOf({ items: [submission, later] });
  fleet.run(() => fleet.state.received);
  const built = () => fleet.trace.filter((each) => each === "build").length;
  for (let tap = 0; tap < 5; tap += 1) {
    fleet.event({ type: "imagesChanged" });
    const endS = fleet.nowS + QUIET_S / 2;
    fleet.run(() => fleet.nowS >= endS);
    assert.equal(built(), 1);
  }
  fleet.run(() => built() === 2);
});

test("a submission that is superseded is built again with a higher sequence", () => {
  const fleet = fleetOf({ items: [submission, later] });
  fleet.refuse = (item) => (item.digest === submission.digest ? { reason: "superseded", sequence: 77 } : null);
  fleet.run(() => taken(fleet, later) && isIdle(fleet));
  assert.equal(fleet.above, 77);
});

test("a build that ends without a submission leaves the next one its sequence", () => {
  const fleet = fleetOf({});
  const aboves = [];
  fleet.refuse = () => (aboves.length === 1 ? { reason: "superseded", sequence: 77 } : null);
  fleet.build = ({ task, above }) => {
    aboves.push(above);
    const item = aboves.length === 2 ? null : itemOf("submission", submission, task);
    fleet.later(() => {
      fleet.event({ type: "built", task, item, failed: false });
      if (!item) fleet.event({ type: "imagesChanged" });
    }, 1);
  };
  fleet.run(() => aboves.length === 3 && isIdle(fleet));
  assert.deepEqual(aboves, [0, 77, 77]);
});

for (const reason of ["digest", "quota", "unknown_task", "no_space", "signature"]) {
  test(`an upload that is refused as ${reason} is tried until it is taken`, () => {
    const fleet = fleetOf({});
    let times = 0;
    fleet.refuse = () => (times++ < 6 ? { reason } : null);
    fleet.run(() => times === 5 && fleet.state.uploads[0]?.dueS > fleet.nowS);
    assert.equal(fleet.state.uploads[0].problem, reason);
    fleet.run(() => taken(fleet, submission) && isIdle(fleet));
  });
}

for (const reason of ["unknown_device", "revoked"]) {
  test(`a device that is refused as ${reason} ends`, () => {
    const fleet = fleetOf({});
    fleet.refuse = () => ({ reason });
    fleet.run(() => fleet.state.ended);
    assert.equal(fleet.state.ended, reason);
    fleet.trace.length = 0;
    fleet.event({ type: "imagesChanged" });
    fleet.event({ type: "connected", maxPacketBytes: null });
    assert.deepEqual(fleet.trace, []);
  });
}

test("a refusal that answers nothing is ignored", () => {
  const fleet = fleetOf({});
  fleet.run(() => fleet.state.received);
  const receipt = { digest: unhex(evaluation.digest), status: "refused", reason: "revoked", missing: [], detail: "", sequence: 0 };
  fleet.event({ type: "receipt", receipt });
  assert.equal(fleet.state.ended, "");
});

test("a head that is refused is not installed again, until the aggregator starts again", () => {
  const fleet = fleetOf({ reason: "classes" });
  const installs = () => fleet.trace.filter((each) => each === "install").length;
  fleet.event({ type: "head", manifest: heads(), isCanary: false });
  fleet.run(() => taken(fleet, evaluation) && isIdle(fleet));
  assert.deepEqual([installs(), fleet.state.installed, fleet.state.refused.reason], [1, "", "classes"]);
  fleet.event({ type: "aggregatorStarted" });
  assert.equal(installs(), 2);
});

test("a canary installs the candidate, and other devices the current head", () => {
  const candidate = { version: 2, head: refOf(head, "head.onnx") };
  const current = { version: 1, head: refOf(later, "older.onnx") };
  for (const isCanary of [true, false]) {
    const fleet = fleetOf({});
    fleet.blobs.set(later.digest, later.payload);
    fleet.install = ({ head: ref }) => (fleet.version = ref.version);
    fleet.event({ type: "head", manifest: { ...heads(), current, candidate }, isCanary });
    fleet.run(() => fleet.version);
    assert.equal(fleet.version, isCanary ? 2 : 1);
  }
});

test("an expired task is not built for, and an expired head not installed", () => {
  const fleet = fleetOf({});
  fleet.event({ type: "expired", channels: new Set(["task", "head"]) });
  fleet.event({ type: "head", manifest: heads(), isCanary: false });
  fleet.run(() => fleet.state.stored.size === 2);
  assert.ok(!fleet.trace.includes("build") && !fleet.trace.includes("install"));
  fleet.event({ type: "expired", channels: new Set() });
  assert.ok(fleet.trace.includes("build") && fleet.trace.includes("install"));
});

test("a head of another task, and a task that is not supported, are ignored", () => {
  const fleet = fleetOf({});
  fleet.run(() => fleet.state.received);
  fleet.event({ type: "head", manifest: { ...heads(), task: unhex(digestOf("other")) }, isCanary: false });
  fleet.trace.length = 0;
  fleet.event({ type: "task", digest: digestOf("rounds"), manifest: { ...manifest, program: {} } });
  assert.deepEqual([fleet.trace, fleet.state.uploads], [[], []]);
  const refused = [{ program: {} }, { statistics: {} }, { differential_privacy: {}, statistics: {} }, { perturbation: {} }, { backbones: [1, 2] }];
  assert.deepEqual(refused.map((each) => unsupportedReason({ ...manifest, ...each })), ["rounds", "statistics", "privacy", "perturbation", "several_backbones"]);
  assert.equal(unsupportedReason({ ...manifest, prototypes: "auto", columns: [[0, 3]] }), "");
});

test("a blob whose bytes are changed on the way is downloaded again, later and later", () => {
  const fleet = fleetOf({});
  const whole = fleet.blobs.get(backbone.digest);
  fleet.blobs.set(backbone.digest, whole.map((byte) => byte ^ 1));
  fleet.run(() => fleet.state.download?.damaged === 4);
  assert.ok(!fleet.state.stored.size);
  fleet.blobs.set(backbone.digest, whole);
  fleet.run(() => fleet.state.stored.has(backbone.digest));
});

test("a download continues at the stored bytes, and takes no frame that was not asked for", () => {
  const fleet = fleetOf({});
  fleet.partial.set(backbone.digest, backbone.payload.subarray(0, 30_000));
  const { payload } = backbone;
  const frame = (offset, data, size_bytes = payload.length) => fleet.event({ type: "frame", frame: { digest: unhex(backbone.digest), size_bytes, offset, data } });
  frame(0, payload.subarray(0, 1000)); // before the size of the stored part is known
  fleet.run(() => fleet.state.connected && fleet.state.download?.until);
  frame(39_990, payload.subarray(0, 11)); // beyond the end
  frame(30_000, payload.subarray(0, 5), 50_000); // of another size
  assert.equal(fleet.state.download.offset, 30_000);
  fleet.run(() => fleet.state.stored.has(backbone.digest));
});

test("frames ahead of their turn are bounded in number and bytes", () => {
  let { state } = step({ ...START, connected: true }, { type: "task", digest: TASK, manifest: { ...manifest, backbones: [{ ...refOf(backbone, ""), size_bytes: 2 ** 30 }] } }, 0);
  ({ state } = step(state, { type: "opened", digest: backbone.digest, offset: 0 }, 0));
  for (let at = 1; at < 6000; at += 1) {
    const frame = { digest: unhex(backbone.digest), size_bytes: 2 ** 30, offset: at, data: new Uint8Array(3000) };
    ({ state } = step(state, { type: "frame", frame }, 0));
  }
  assert.ok(state.download.ahead.length * 3000 <= 2 * 16 * 61_440);
});

test("without room in the browser nothing is downloaded, and the download continues once there is", () => {
  const fleet = fleetOf({});
  fleet.event({ type: "full", isFull: true });
  const endS = fleet.nowS + 100;
  fleet.run(() => fleet.nowS > endS);
  assert.equal(fleet.state.stored.size, 0);
  fleet.event({ type: "full", isFull: false });
  fleet.run(() => fleet.state.received);
});

test("a device that has ended is not shown as connected", () => {
  const known = { phase: "member", images: [], groups: [], left: [], storage: {}, problem: null };
  const shown = (ended) => {
    const { connection, problem } = deviceState(known, { state: { ...START, connected: true, ended }, closed: "", buildProblem: "" });
    return [connection, problem?.key];
  };
  assert.deepEqual(shown(""), ["online", undefined]);
  assert.deepEqual(shown("replaced"), ["offline", "replaced"]);
});
