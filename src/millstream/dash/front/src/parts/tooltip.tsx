// A box with details next to the pointer. It stays inside the window.

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

export function Tooltip(props: { x: number; y: number; children: ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const element = box.current;
    if (element === null) return;
    const { width, height } = element.getBoundingClientRect();
    const left = props.x + 14 + width > window.innerWidth - 8 ? props.x - width - 14 : props.x + 14;
    const top = props.y + 16 + height > window.innerHeight - 8 ? props.y - height - 12 : props.y + 16;
    element.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
  });
  return (
    <div class="tooltip" ref={box} role="tooltip">
      {props.children}
    </div>
  );
}
