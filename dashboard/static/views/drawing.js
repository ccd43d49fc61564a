import { useEffect } from "../vendor/standalone.module.js";

/** Call `draw(canvas, ...inputs)` when an input, the width or the theme changes. */
export function useDrawing(canvas, draw, inputs) {
  useEffect(() => {
    const show = () => canvas.current && draw(canvas.current, ...inputs);
    const fit = new ResizeObserver(show);
    fit.observe(canvas.current.parentElement);
    window.addEventListener("themechange", show);
    return () => {
      fit.disconnect();
      window.removeEventListener("themechange", show);
    };
  }, inputs);
}
