// @ts-check
/** A device in its fleet: passes events to the state machine, and performs its actions. */

import { encodeMessage } from "../wire/messages.js";
import { hex } from "../wire/signatures.js";
import { deviceTopics, fleetTopics } from "../wire/topics.js";
import { Connection } from "./connection.js";
import { Inbox } from "./inbox.js";
import { START, step } from "./machine.js";
import { gatewayUrl, unhex } from "./membership.js";
import { OwnPresence } from "./presence.js";
import { Store, StorageFull } from "./store.js";
import { dropUnused, keepParts, leavingFrames, verified } from "./transfers.js";
import { Changed, itemOf } from "./work.js";

/** @typedef {import("./machine.js").Event} Event */
/** @typedef {import("./machine.js").Action} Action */
/** @typedef {import("./connection.js").ConnectionEvent} ConnectionEvent */
/** @typedef {import("./work.js").OutboxRow} OutboxRow */
/** @template {Action["type"]} T @typedef {Extract<Action, {type: T}>} ActionOf */
/**
 * @typedef {object} Parts
 * @property {Store} store
 * @property {import("./features.js").Features} features
 * @property {import("./work.js").Work} work
 * @property {import("./store.js").Membership} membership
 * @property {import("./membership.js").Key} key
 * @property {() => {images: Record<string, number>, unusable: number}} imageCounts what the device publishes of its images
 * @property {(change: {groups?: import("./store.js").StoredGroup[], heads?: import("./store.js").Facts["heads"], isFull?: boolean}) => void} onChange
 * @property {(error: unknown) => void} onCrash an error that nothing expects
 */

/** Seconds between two checks of what no message announces, and until a full storage is tried again. */
const TICK_S = 1;
const FULL_S = 60;
/** Close codes of the gateway after which the device ends, and others that a person must know of. @type {Record<number, string>} */
const CLOSED = { 4401: "not_enrolled", 4403: "revoked", 4404: "wrong_fleet", 4429: "too_many", 4502: "broker" };

export class Session {
  /** @type {Promise<void>} */
  #last = Promise.resolve();
  /** One job at a time. @type {Promise<void>} */
  #jobs = Promise.resolve();
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #timer;
  #fullS = Infinity;
  #info = "";
  /** Why the connection ended, as the gateway says; empty while it is open. */
  closed = "";
  /** Why the last build had no submission; empty if it had one, or waits for images. */
  buildProblem = "";
  state = START;

  /** @param {Parts} parts @param {Inbox} inbox @param {OwnPresence} presence */
  constructor(parts, inbox, presence) {
    const { fleet, device } = parts.membership;
    this.parts = parts;
    this.inbox = inbox;
    this.presence = presence;
    this.topics = deviceTopics(fleet, device);
    const { task, round, head, state } = fleetTopics(fleet);
    this.connection = new Connection({
      url: () => gatewayUrl(parts.membership, parts.key),
      clientId: device,
      // Broadcasts are for tasks with rounds: they would cost a phone's data.
      topics: [task, round, head, state, this.topics.ack, this.topics.blk, this.topics.state],
      will: () => presence.message("offline"),
      onEvent: (event) => this.#enqueue(() => this.#connectionEvent(event)),
    });
  }

  /** @param {Parts} parts */
  static async open(parts) {
    const { store, membership, key } = parts;
    const [trust, stored] = await Promise.all([store.fact("trust"), store.fact("epoch")]);
    if (!trust) throw new Error("a membership without trust");
    const epoch = Math.max((stored ?? 0) + 1, Math.floor(Date.now() / 1000));
    await store.setFacts({ epoch });
    const presence = new OwnPresence(deviceTopics(membership.fleet, membership.device).state, key, epoch);
    const session = new Session(parts, new Inbox(store, membership, trust), presence);
    session.#start();
    return session;
  }

  /** What the page is shown of it. @returns {import("./state.js").InFleet} */
  get shown() {
    const { state, closed, buildProblem, inbox } = this;
    return { state, closed, buildProblem, isAggregatorOnline: inbox.isAggregatorOnline };
  }

  /** @param {Event} event */
  emit(event) {
    this.#enqueue(() => this.#step(event));
  }

  /** Publish that the device has stopped, and end. */
  async stop() {
    clearInterval(this.#timer);
    this.state = { ...this.state, ended: this.state.ended || "stopped" };
    const last = await this.presence.message(this.state.ended === "replaced" ? "replaced" : "stopped");
    await this.connection.stop(last);
  }

  #start() {
    this.#enqueue(async () => {
      const { store } = this.parts;
      const [heads, evaluated, outbox, blobs] = await Promise.all([store.fact("heads"), store.fact("evaluated"), store.all("outbox"), store.keys("blobs")]);
      const installed = heads?.installed.head ?? "";
      // A head without an evaluation is installed again.
      const isReported = installed === evaluated || outbox.some((/** @type {OutboxRow} */ row) => row.about === installed);
      this.state = { ...START, stored: new Set(blobs), installed: isReported ? installed : "", evaluated: evaluated ?? "" };
      await this.#expire();
      const task = await this.inbox.recall();
      if (task) await this.#step(task);
      await this.#readOutbox();
      this.connection.start();
    });
    this.#timer = setInterval(() => this.#enqueue(() => this.#tick()), TICK_S * 1000);
  }

  /** @param {() => Promise<void>} act */
  #enqueue(act) {
    this.#last = this.#last.then(async () => {
      if (this.state.ended) return;
      await act();
      if (this.state.ended) await this.#end();
      this.parts.onChange({});
    }).catch((error) => this.parts.onCrash(error));
  }

  async #end() {
    const { store } = this.parts;
    if (this.state.ended === "replaced") await store.setFacts({ replaced: true });
    await this.stop();
  }

  async #tick() {
    if (performance.now() / 1000 > this.#fullS) {
      this.#fullS = Infinity;
      this.parts.onChange({ isFull: false });
      await this.#step({ type: "full", isFull: false });
    }
    await this.#expire();
    await this.#step({ type: "ticked" });
    await this.#publishInfo();
  }

  async #expire() {
    const channels = this.inbox.expired();
    if (String([...channels]) !== String([...this.state.expired])) await this.#step({ type: "expired", channels });
  }

  /** @param {ConnectionEvent} event */
  async #connectionEvent(event) {
    if (event.type === "received") return this.#received(event);
    if (event.type === "connected") {
      this.closed = "";
      this.#info = "";
      this.#publish(await this.presence.message("online"));
      return this.#step({ type: "connected", maxPacketBytes: event.maxPacketBytes });
    }
    this.closed = CLOSED[event.code] ?? "offline";
    await this.#step({ type: "disconnected" });
    if (this.closed === "revoked") await this.#step({ type: "ended", reason: "revoked" });
  }

  /** @param {Extract<ConnectionEvent, {type: "received"}>} received */
  async #received({ topic, payload, isRetained }) {
    if (topic === this.topics.state) return this.#ownPresence(payload);
    const event = await this.inbox.receive(topic, payload, isRetained);
    await this.#expire();
    if (!event) return;
    if (event.type === "receipt" && event.receipt.reason === "signature" && this.presence.isContested && this.#isOwn(event.receipt)) {
      return this.#step({ type: "ended", reason: "name_taken" });
    }
    if (event.type === "aggregatorStarted") await this.#readOutbox(); // with refused items: its task file may have changed
    const isNew = event.type === "task" && event.digest !== this.state.task?.digest;
    await this.#step(event);
    if (isNew || this.inbox.wasRenewed) await this.#readOutbox();
    this.inbox.wasRenewed = false;
  }

  /** @param {{digest: Uint8Array}} receipt */
  #isOwn({ digest }) {
    return this.state.uploads.some(({ item }) => item.digest === hex(digest));
  }

  /** @param {Uint8Array} payload */
  async #ownPresence(payload) {
    const reaction = await this.presence.receive(payload);
    const epoch = Number(this.presence.own.epoch);
    if (epoch > ((await this.parts.store.fact("epoch")) ?? 0)) await this.parts.store.setFacts({ epoch });
    if (reaction === "replaced") return this.#step({ type: "ended", reason: "replaced" });
    if (reaction === "publish") this.#publish(await this.presence.message("online"));
  }

  async #readOutbox() {
    const rows = /** @type {OutboxRow[]} */ (await this.parts.store.all("outbox"));
    await this.#step({ type: "outbox", items: rows.map(itemOf) });
  }

  /** @param {Event} event */
  async #step(event) {
    const { evaluated } = this.state;
    const { state, actions } = step(this.state, event, performance.now() / 1000);
    this.state = state;
    if (state.evaluated !== evaluated) await this.parts.store.setFacts({ evaluated: state.evaluated });
    for (const action of actions) await this.#perform(action);
  }

  /** @param {Action} action */
  async #perform(action) {
    try {
      switch (action.type) {
        case "open": return await this.#open(action);
        case "request": {
          const { digest, offset, length } = action;
          const payload = encodeMessage("get", { digest: unhex(digest), offset, length });
          return this.#publish({ topic: this.topics.get, payload, retain: false });
        }
        case "append": return await this.#append(action);
        case "send": return await this.#send(action);
        case "received": return await this.#receipt(action);
        case "build": return this.#job(() => this.#build(action));
        case "install": return this.#job(() => this.#install(action));
      }
    } catch (error) {
      if (!(error instanceof StorageFull)) throw error;
      await this.#full();
    }
  }

  async #full() {
    this.#fullS = performance.now() / 1000 + FULL_S;
    this.parts.onChange({ isFull: true });
    await this.#step({ type: "full", isFull: true });
  }

  /** @param {import("./connection.js").Outgoing} outgoing */
  #publish(outgoing) {
    void this.connection.publish(outgoing);
  }

  /** @param {() => Promise<void>} run */
  #job(run) {
    this.#jobs = this.#jobs.then(run).catch((error) => this.parts.onCrash(error));
  }

  /** @param {ActionOf<"open">} action */
  async #open({ blob }) {
    const { store } = this.parts;
    this.emit({ type: "stored", digests: await dropUnused(store, this.state) });
    const offset = await store.partBytes(blob.digest);
    if (offset >= blob.size_bytes) await this.#finish(blob.digest);
    else this.emit({ type: "opened", digest: blob.digest, offset });
  }

  /** @param {ActionOf<"append">} action */
  async #append({ blob, offset, parts, done }) {
    await keepParts(this.parts.store, blob.digest, offset, parts);
    if (done) await this.#finish(blob.digest);
  }

  /** @param {string} digest */
  async #finish(digest) {
    this.emit({ type: "finished", digest, isValid: await verified(this.parts.store, digest) });
  }

  /** @param {ActionOf<"send">} action */
  async #send({ item, ranges }) {
    const row = /** @type {OutboxRow | undefined} */ (await this.parts.store.get("outbox", item.digest));
    if (!row) return this.#readOutbox(); // replaced by a newer one
    const frames = await leavingFrames(this.parts, row, ranges, this.state.chunk);
    const sent = frames.map((frame) => this.connection.publish({ topic: this.topics.up, payload: frame, retain: false }));
    void Promise.all(sent).then((answers) => answers.every(Boolean) && this.emit({ type: "drained" }));
  }

  /** @param {ActionOf<"received">} action */
  async #receipt({ item }) {
    const row = await this.parts.store.get("outbox", item.digest);
    if (row) await this.parts.store.write({ outbox: [{ ...row, received: true }] });
  }

  /** @param {ActionOf<"build">} action */
  async #build({ task, manifest, above }) {
    try {
      const { item, groups } = await this.parts.work.build(task, manifest, above);
      this.buildProblem = "";
      this.parts.onChange({ groups });
      this.emit({ type: "built", task, item, failed: false });
    } catch (error) {
      if (error instanceof StorageFull) this.#enqueue(() => this.#full());
      if (!(error instanceof Changed)) this.buildProblem = error instanceof Error ? error.message : String(error);
      this.emit({ type: "built", task, item: null, failed: !(error instanceof Changed) });
      if (error instanceof Changed) this.emit({ type: "imagesChanged" });
    }
  }

  /** @param {ActionOf<"install">} action */
  async #install({ task, manifest, head }) {
    const digest = hex(head.head.digest);
    const { report, reason, heads } = await this.parts.work.install(task, manifest, head);
    if (heads) this.parts.onChange({ heads });
    this.emit({ type: "installed", head: digest, report, reason });
  }

  /** Publish what the device has and reports, if it has changed. */
  async #publishInfo() {
    const { task, stored, refused, connected } = this.state;
    if (!connected || !task) return;
    const { images, unusable } = this.parts.imageCounts();
    const heads = await this.parts.store.fact("heads");
    const refusedMessages = this.inbox.refused;
    const info = {
      epoch: this.presence.own.epoch, software: "phone", runtime: "onnxruntime-web wasm",
      backbones: task.manifest.backbones.map(({ digest }) => digest).filter((digest) => stored.has(hex(digest))),
      images, unusable_images: unusable, problem: this.buildProblem.slice(0, 200), warning: (refused?.reason ?? "").slice(0, 200),
      head_version: heads?.installed.task === task.digest ? heads.installed.version : 0,
      drift: undefined,
    };
    // Refused messages are reported when the number for one reason reaches a power of two.
    const counts = Object.entries(refusedMessages).map(([reason, count]) => [reason, Math.floor(Math.log2(count))]);
    const text = JSON.stringify([{ ...info, backbones: info.backbones.map(hex), epoch: String(info.epoch) }, counts]);
    if (text === this.#info) return;
    this.#info = text;
    const payload = encodeMessage("info", { ...info, refused_messages: refusedMessages });
    this.#publish({ topic: this.topics.info, payload, retain: true });
  }
}
