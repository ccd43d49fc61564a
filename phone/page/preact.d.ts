// Types of what the page uses of its libraries, which are not in the repository.

declare module "*/vendor/standalone.module.js" {
  export type Node = unknown;
  export function html(strings: TemplateStringsArray, ...values: unknown[]): Node;
  export function render(node: Node, parent: Element): void;
  export function useState<T>(initial: T | (() => T)): [T, (next: T | ((before: T) => T)) => void];
  export function useEffect(effect: () => void | (() => void), inputs?: readonly unknown[]): void;
  export function useRef<T>(initial: T): { current: T };
  export function useMemo<T>(make: () => T, inputs: readonly unknown[]): T;
}
