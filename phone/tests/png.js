/** A decoder of PNG for tests: a browser has its own. */

import { inflateSync } from "node:zlib";

const CHANNELS = { 0: 1, 2: 3, 3: 1, 4: 2, 6: 4 };

/**
 * @param {Uint8Array} file not interlaced, of 8 or 16 bits
 * @returns {{rgba: Uint8Array, width: number, height: number, bits: number, orientation: number}}
 */
export function decodePng(file) {
  if (Buffer.from(file.subarray(1, 4)).toString() !== "PNG") throw new Error("no PNG");
  const chunks = {};
  const data = [];
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  for (let at = 8; ;) {
    const size = view.getUint32(at);
    const type = Buffer.from(file.subarray(at + 4, at + 8)).toString();
    const body = file.subarray(at + 8, at + 8 + size);
    if (body.length !== size) throw new Error("cut off");
    if (type === "IEND") break;
    if (type === "IDAT") data.push(body);
    chunks[type] = body;
    at += size + 12;
  }
  const header = new DataView(chunks.IHDR.buffer, chunks.IHDR.byteOffset);
  const [width, height, bits, kind] = [header.getUint32(0), header.getUint32(4), header.getUint8(8), header.getUint8(9)];
  if (bits < 8 || header.getUint8(12)) throw new Error("not decoded by this helper");
  const rows = unfiltered(inflateSync(Buffer.concat(data)), height, (width * CHANNELS[kind] * bits) / 8, (CHANNELS[kind] * bits) / 8);
  const sample = (at) => (bits === 16 ? (rows[2 * at] << 8) | rows[2 * at + 1] : rows[at]);
  const level = (at) => rows[(at * bits) / 8];
  const rgba = new Uint8Array(width * height * 4);
  for (let pixel = 0; pixel < width * height; pixel += 1) {
    const at = pixel * CHANNELS[kind];
    const colors = kind === 2 || kind === 6 ? 3 : 1;
    let color = Array.from({ length: colors }, (_, each) => level(at + each));
    let alpha = kind === 4 || kind === 6 ? level(at + colors) : 255;
    if (kind === 3) {
      color = [...chunks.PLTE.subarray(3 * level(at), 3 * level(at) + 3)];
      alpha = chunks.tRNS?.[level(at)] ?? 255;
    } else if (chunks.tRNS) {
      const clear = (each) => (chunks.tRNS[2 * each] << 8) | chunks.tRNS[2 * each + 1];
      if (color.every((_, each) => sample(at + each) === clear(each))) alpha = 0;
    }
    rgba.set([color[0], color[1] ?? color[0], color[2] ?? color[0], alpha], 4 * pixel);
  }
  return { rgba, width, height, bits, orientation: orientationOf(chunks.eXIf) };
}

/** @param {Uint8Array | undefined} exif big-endian, with one entry */
function orientationOf(exif) {
  if (!exif) return 1;
  const view = new DataView(exif.buffer, exif.byteOffset);
  const isLittle = exif[0] === 0x49;
  const at = view.getUint32(4, isLittle) + 2;
  return view.getUint16(at, isLittle) === 0x0112 ? view.getUint16(at + 8, isLittle) : 1;
}

/** Undo the filter of each row. */
function unfiltered(data, height, rowBytes, pixelBytes) {
  const rows = new Uint8Array(height * rowBytes);
  if (data.length < height * (rowBytes + 1)) throw new Error("cut off");
  for (let y = 0; y < height; y += 1) {
    const filter = data[y * (rowBytes + 1)];
    for (let x = 0; x < rowBytes; x += 1) {
      const at = y * rowBytes + x;
      const left = x >= pixelBytes ? rows[at - pixelBytes] : 0;
      const above = y ? rows[at - rowBytes] : 0;
      const corner = y && x >= pixelBytes ? rows[at - rowBytes - pixelBytes] : 0;
      const guess = left + above - corner;
      const [byLeft, byAbove, byCorner] = [left, above, corner].map((each) => Math.abs(guess - each));
      const paeth = byLeft <= byAbove && byLeft <= byCorner ? left : byAbove <= byCorner ? above : corner;
      rows[at] = data[y * (rowBytes + 1) + 1 + x] + [0, left, above, (left + above) >> 1, paeth][filter];
    }
  }
  return rows;
}
