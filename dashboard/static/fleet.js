// The fleet's state as the server sends it: fetched again at each server-sent event.

const listeners = new Set();

/** What all views show. */
export const fleet = {
  status: null,
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

let tag = "";

// In a header and not in a cookie: other pages, and servers on other ports of this machine, never receive it.
let token = sessionStorage.getItem("token") ?? "";

/** Send a request, with the token if the operator has given one. */
export function request(path, options = {}) {
  const headers = token ? { ...options.headers, Authorization: `Bearer ${token}` } : options.headers;
  return fetch(path, { cache: "no-store", ...options, headers });
}

/** Return the status; undefined if it has not changed. */
async function fetchStatus() {
  const response = await request("api/v1/status", { headers: tag ? { "If-None-Match": tag } : {} });
  const date = Date.parse(response.headers.get("date") ?? "");
  if (date) fleet.skew_s = (date - Date.now()) / 1000;
  if (response.status === 304) return undefined;
  if (!response.ok) throw new ServerProblem(response.status, await problemOf(response));
  tag = response.headers.get("etag");
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
      const status = await fetchStatus();
      await pause();
      publish(status === undefined ? { problem: "" } : { problem: "", status });
    } while (isStale);
  } catch (error) {
    if (error instanceof ServerProblem && error.status === 401) {
      tag = "";
      publish({ session: { read: false, command: false }, status: null });
    } else {
      publish({ problem: error instanceof ServerProblem ? error.message : "" });
      if (fleet.live) setTimeout(refresh, 3000);
    }
  } finally {
    isLoading = false;
  }
}

/** Let the browser paint and answer between two tasks. */
export function pause() {
  return new Promise((resolve) => setTimeout(resolve));
}

let isListening = false;

/** Follow the server-sent events until the connection ends. They are read by fetch, as an EventSource sends no token. */
async function listen() {
  if (isListening) return;
  isListening = true;
  try {
    const response = await request("api/v1/events");
    if (response.ok) {
      publish({ live: true });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const lines = (text + part.value).split("\n");
        text = lines.pop();
        if (lines.some((line) => line.startsWith("data:"))) refresh();
      }
    }
  } catch {
    // The connection is lost: start again.
  }
  isListening = false;
  publish({ live: false });
  setTimeout(start, 1000);
}

/** Ask what this browser may do, and follow the fleet if it may read. */
export async function start() {
  try {
    const response = await request("api/v1/session");
    if (response.status === 401) {
      setToken("");
      return start();
    }
    const session = await response.json();
    publish({ session });
    if (session.read) listen();
  } catch {
    publish({ live: false });
    setTimeout(start, 2000);
  }
}

function setToken(text) {
  token = text;
  sessionStorage.setItem("token", text);
}

async function send(path, body) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new ServerProblem(response.status, await problemOf(response));
  return response;
}

/** Use a token from now on, until the tab is closed. */
export async function signIn(text) {
  const response = await fetch("api/v1/session", { headers: { Authorization: `Bearer ${text.trim()}` } });
  if (!response.ok) throw new ServerProblem(response.status, await problemOf(response));
  setToken(text.trim());
  publish({ session: await response.json() });
  listen();
}

/** Save a file of the server, where the link alone would send no token. */
export async function save(event) {
  if (!token) return;
  event.preventDefault();
  const { href } = event.currentTarget;
  const response = await request(href);
  if (response.ok) saveAs(await response.blob(), href.split("/").at(-1));
}

function saveAs(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

/** Carry out an operator command; returns the outcome in words, or a link with its QR code. */
export async function command(name, options) {
  const response = await send(`api/v1/commands/${name}`, options);
  if (name === "link") return response.json();
  if (name !== "enroll") return (await response.json()).message;
  const file = `${options.device}.zip`;
  saveAs(await response.blob(), file);
  return `enrolled ${options.device}: unpack ${file} on the device; it has the device's private keys`;
}
