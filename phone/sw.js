// The page without a network: all files of one version, which the server names in files.js.

importScripts("files.js");

// Of this page: other fleets can be below other paths of the host. A path has no space.
const PREFIX = `protofleet${new URL("..", self.location).pathname} `;
const { version, files } = self.FILES;
const CACHE = PREFIX + version;
const ADDRESSES = new Set(files.map((file) => new URL(file, self.location).href));

async function install() {
  const cache = await caches.open(CACHE);
  await Promise.all(
    files.map(async (file) => {
      const response = await fetch(file, { cache: "no-cache" });
      if (!response.ok) throw new Error(`${file}: ${response.status}`);
      await cache.put(file, response);
    }),
  );
}

async function activate() {
  const names = await caches.keys();
  await Promise.all(names.filter((name) => name.startsWith(PREFIX) && name !== CACHE).map((name) => caches.delete(name)));
  await self.clients.claim();
}

async function answer(request, address) {
  const cache = await caches.open(CACHE);
  return (await cache.match(address)) ?? fetch(request);
}

self.addEventListener("install", (event) => event.waitUntil(install()));
self.addEventListener("activate", (event) => event.waitUntil(activate()));
self.addEventListener("message", (event) => event.data === "activate" && self.skipWaiting());
self.addEventListener("fetch", (event) => {
  const address = event.request.url.split(/[?#]/)[0];
  if (event.request.method === "GET" && ADDRESSES.has(address)) event.respondWith(answer(event.request, address));
});
