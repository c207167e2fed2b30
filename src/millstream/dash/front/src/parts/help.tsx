// The list of keys, as a dialog.

import { useEffect, useRef } from "preact/hooks";

const KEYS: ReadonlyArray<readonly [string, ReadonlyArray<readonly [string, string]>]> = [
  ["Everywhere", [["1 … 5", "overview, timeline, flow, rollouts, runs"], ["[  ]", "previous, next run"], ["p", "pause and continue the live update"], ["t", "colors: as the system, light, dark"], ["?", "this list"]]],
  ["Curves", [["←  →", "move the cursor"]]],
  ["Timeline", [["+  −", "zoom; also the wheel, and two fingers"], ["←  →", "pan; also dragging"], ["0", "all of it"], ["↑  ↓", "choose a lane"], [",  .", "previous, next piece of work"], ["Esc", "choose nothing"]]],
  ["Rollouts", [["/", "search"], ["j  k", "next, previous rollout"], ["h  l", "previous, next member of the group"], ["c", "color tokens by something else"], ["b", "members side by side"], ["Esc", "back to the list"]]],
];

export function Help(props: { isOpen: boolean; onClose: () => void; version: string }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (props.isOpen && !dialog.current?.open) dialog.current?.showModal();
    else if (!props.isOpen && dialog.current?.open) dialog.current.close();
  }, [props.isOpen]);
  return (
    <dialog ref={dialog} aria-labelledby="help" onClose={props.onClose} onClick={(event) => event.target === dialog.current && props.onClose()}>
      <div class="help">
        <h2 id="help">Keys</h2>
        {KEYS.map(([title, rows]) => (
          <section key={title}>
            <h3>{title}</h3>
            <dl>
              {rows.map(([keys, words]) => (
                <div key={keys}><dt>{keys.split("  ").map((key) => <kbd key={key}>{key}</kbd>)}</dt><dd>{words}</dd></div>
              ))}
            </dl>
          </section>
        ))}
        <p class="note">The address has all that is chosen: copy it to show the same to a colleague.{props.version && ` millstream ${props.version}`}</p>
        <button type="button" onClick={props.onClose}>Close</button>
      </div>
    </dialog>
  );
}
