import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { Features, GraphFailed } from "../device/features.js";

/** A worker that answers when the test says so. */
class Worker {
  static last;
  calls = [];
  isTerminated = false;
  constructor() {
    Worker.last = this;
  }
  postMessage(call) {
    this.calls.push(call);
  }
  answer(result) {
    this.onmessage({ data: { id: this.calls.shift().id, result } });
  }
  terminate() {
    this.isTerminated = true;
  }
}

test("a call's time limit begins when the worker has answered the calls before it", async () => {
  mock.timers.enable();
  Object.assign(globalThis, { Worker, crossOriginIsolated: false });
  const features = new Features(async () => new Blob());
  const [first, second] = [features.take(new Blob()), features.take(new Blob())];
  const worker = Worker.last;
  worker.answer(); // start
  mock.timers.tick(119_000);
  worker.answer("first");
  assert.equal(await first, "first");
  mock.timers.tick(119_000);
  assert.equal(worker.isTerminated, false);
  mock.timers.tick(2_000);
  await assert.rejects(second, GraphFailed);
  assert.equal(worker.isTerminated, true);
  mock.timers.reset();
});
