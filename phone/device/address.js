// @ts-check
/** Where this page is: fleets can share a host, each below a path of a proxy. */

/** `https://HOST`, and the path of a proxy. */
export const ADDRESS = new URL("../..", import.meta.url).href.slice(0, -1);

/** Name of what this page keeps in the browser, apart from the pages of other fleets. */
export const OWN_NAME = `protofleet${ADDRESS.slice(new URL(ADDRESS).origin.length)}`;
