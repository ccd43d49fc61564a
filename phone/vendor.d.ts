/** What the device uses of the libraries below `vendor/`. */

declare module "*/mqtt.esm.js" {
  interface Packet {
    retain?: boolean;
    sessionPresent?: boolean;
    properties?: { maximumPacketSize?: number };
  }
  interface Message {
    topic: string;
    payload: Uint8Array;
    qos: 0 | 1 | 2;
    retain: boolean;
  }
  interface Options {
    protocolVersion: 4 | 5;
    clientId: string;
    clean: boolean;
    keepalive: number;
    connectTimeout: number;
    reconnectPeriod: number;
    queueQoSZero: boolean;
    resubscribe: boolean;
    timerVariant: "native";
    createWebsocket(url: string, protocols: string[]): WebSocket;
    will?: Message;
    properties?: { maximumPacketSize: number };
  }
  export interface Client {
    stream: { destroy(): void };
    on(event: "connect", listener: (packet: Packet) => void): this;
    on(event: "message", listener: (topic: string, payload: Uint8Array, packet: Packet) => void): this;
    on(event: "close", listener: () => void): this;
    on(event: "error", listener: (error: Error & { code?: number }) => void): this;
    publish(topic: string, payload: Uint8Array, options: { qos: 1; retain: boolean }, done: (error?: Error) => void): this;
    subscribe(topics: string[], options: { qos: 1 }, done: (error: Error | null) => void): this;
    end(force: boolean, done?: () => void): this;
  }
  const mqtt: { connect(url: string, options: Options): Client };
  export default mqtt;
}

declare module "*/ort.wasm.min.mjs" {
  export const env: { wasm: { wasmPaths: string; numThreads: number } };
  export class Tensor {
    constructor(type: string, data: Uint8Array | Float32Array, dims: number[]);
    data: Uint8Array | Float32Array;
  }
  interface Slot {
    name: string;
    isTensor: boolean;
    type: string;
    shape: (number | string)[];
  }
  export class InferenceSession {
    static create(file: Uint8Array, options: { executionProviders: string[] }): Promise<InferenceSession>;
    inputMetadata: Slot[];
    outputMetadata: Slot[];
    run(feeds: Record<string, Tensor>, outputs: string[]): Promise<Record<string, Tensor>>;
    release(): Promise<void>;
  }
}

declare module "*/vendor/standalone.module.js" {
  export type Node = unknown;
  export function html(strings: TemplateStringsArray, ...values: unknown[]): Node;
  export function render(node: Node, parent: Element): void;
  export function useState<T>(initial: T | (() => T)): [T, (next: T | ((before: T) => T)) => void];
  export function useEffect(effect: () => void | (() => void), inputs?: readonly unknown[]): void;
  export function useRef<T>(initial: T): { current: T };
  export function useMemo<T>(make: () => T, inputs: readonly unknown[]): T;
}
