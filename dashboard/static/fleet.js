// The fleet's state as the server sends it: fetched again at each server-sent event.

const listeners = new Set();

/** What all views show. */
export const fleet = {
  status: null,
  details: null,
  problem: "",
  session: { read: true, command: false },
  live: false,
  skew_s: 0,
};

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function publish(changes) {
  Object.assign(fleet, changes);
  for (const listener of listeners) listener();
}

const tags = {};

async function fetchDocument(name) {
  const headers = tags[name] ? { "If-None-Match": tags[name] } : {};
  const response = await fetch(`api/v1/${name}`, { headers, cache: "no-store" });
  const date = Date.parse(response.headers.get("date") ?? "");
  if (date) fleet.skew_s = (date - Date.now()) / 1000;
  if (response.status === 304) return undefined;
  if (!response.ok) throw new ServerProblem(response.status, await problemOf(response));
  tags[name] = response.headers.get("etag");
  return response.json();
}

/** A refusal of the server, with its reason. */
export class ServerProblem extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function problemOf(response) {
  try {
    return (await response.json()).error;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

let isLoading = false;
let isStale = false;

/** Fetch what has changed; calls during a fetch are joined into one more. */
export async function refresh() {
  if (isLoading) {
    isStale = true;
    return;
  }
  isLoading = true;
  try {
    do {
      isStale = false;
      const changes = { problem: "" };
      for (const name of ["status", "details"]) {
        const document = await fetchDocument(name);
        if (document !== undefined) changes[name] = document;
        await pause();
      }
      publish(changes);
    } while (isStale);
  } catch (error) {
    if (error instanceof ServerProblem && error.status === 401) {
      for (const name of Object.keys(tags)) delete tags[name];
      publish({ session: { read: false, command: false }, status: null, details: null });
    } else {
      publish({ problem: error instanceof ServerProblem ? error.message : "" });
    }
  } finally {
    isLoading = false;
  }
}

let projection = null;
let nextProjection = null;
let rest = Promise.resolve();

/** Return the newest prototypes in two dimensions, fetched at most every five seconds, once for all calls meanwhile. */
export function refreshProjection() {
  nextProjection ??= rest.then(async () => {
    nextProjection = null;
    rest = new Promise((resolve) => setTimeout(resolve, 5000));
    projection = (await fetchDocument("prototypes")) ?? projection;
    return projection;
  });
  return nextProjection;
}

/** Let the browser paint and answer between two tasks. */
export function pause() {
  return new Promise((resolve) => setTimeout(resolve));
}

let events = null;

function listen() {
  events?.close();
  events = new EventSource("api/v1/events");
  events.addEventListener("open", () => publish({ live: true }));
  events.addEventListener("change", refresh);
  events.addEventListener("error", () => {
    publish({ live: false });
    if (events.readyState === EventSource.CLOSED) setTimeout(start, 2000);
  });
}

/** Ask what this browser may do, and follow the fleet if it may read. */
export async function start() {
  try {
    const session = await (await fetch("api/v1/session")).json();
    publish({ session });
    if (session.read) listen();
  } catch {
    publish({ live: false });
    setTimeout(start, 2000);
  }
}

async function send(path, body) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new ServerProblem(response.status, await problemOf(response));
  return response;
}

/** Exchange the token for a cookie. */
export async function signIn(token) {
  const session = await (await send("api/v1/session", { token })).json();
  publish({ session });
  if (!fleet.live) listen();
}

/** Carry out an operator command; returns the outcome in words. */
export async function command(name, options) {
  const response = await send(`api/v1/commands/${name}`, options);
  if (name !== "enroll") return (await response.json()).message;
  const file = `${options.device}.zip`;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = file;
  link.click();
  URL.revokeObjectURL(link.href);
  return `enrolled ${options.device}: unpack ${file} on the device; it has the device's private keys`;
}
