// @ts-check
/** What the page needs of its browser. */

/** @typedef {import("./texts.js").Key} Key */

/** @returns {Promise<Key | "">} the first thing that the browser lacks */
export async function missingRequirement() {
  if (!globalThis.isSecureContext || !globalThis.crypto?.subtle) return "insecure";
  if (!(await hasEd25519())) return "no_ed25519";
  if (!(await hasStorage())) return "no_storage";
  if (!returnsPixels()) return "blurred_canvas";
  return "";
}

async function hasEd25519() {
  try {
    await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"]);
    return true;
  } catch {
    return false;
  }
}

/** @returns {Promise<boolean>} */
function hasStorage() {
  return new Promise((resolve) => {
    try {
      const request = indexedDB.open("protofleet-probe");
      request.onsuccess = () => {
        request.result.close();
        indexedDB.deleteDatabase("protofleet-probe");
        resolve(true);
      };
      request.onerror = () => resolve(false);
    } catch {
      resolve(false);
    }
  });
}

/** Return false in a browser that adds noise to the pixels that a canvas returns. */
function returnsPixels() {
  const [width, height] = [16, 16];
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  if (!context) return false;
  const drawn = new ImageData(width, height);
  for (let at = 0; at < drawn.data.length; at += 1) drawn.data[at] = at % 4 === 3 ? 255 : (at * 37) % 256;
  context.putImageData(drawn, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  return data.every((level, at) => level === drawn.data[at]);
}
