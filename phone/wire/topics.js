// @ts-check
/** Topics of a fleet and of a device. */

const encoder = new TextEncoder();

/** @param {Uint8Array} data @returns {number} the CRC-32 of ISO 3309, as in zip files */
function crc32(data) {
  let crc = ~0;
  for (const byte of data) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit += 1) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}

/** @param {string} fleet */
export function fleetTopics(fleet) {
  const at = `pf/1/${fleet}`;
  return { task: `${at}/task`, round: `${at}/round`, head: `${at}/head`, state: `${at}/state`, cast: `${at}/cast` };
}

/** @param {string} fleet @param {string} device */
export function deviceTopics(fleet, device) {
  const at = `pf/1/${fleet}/d/${device}`;
  const shard = crc32(encoder.encode(device)) % 64;
  return {
    state: `${at}/state`, info: `${at}/info`, up: `${at}/up/${shard}`, ack: `${at}/ack`, get: `${at}/get`, blk: `${at}/blk`,
  };
}
