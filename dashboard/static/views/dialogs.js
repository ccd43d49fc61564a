// The token, and operator commands behind a confirmation.

import { html, useEffect, useRef, useState } from "../vendor/standalone.module.js";
import { command, fleet, signIn } from "../fleet.js";

const COMMANDS = {
  rollback: {
    title: (head) => `Roll back to head ${head}?`,
    text: "All devices return to this head, and a candidate is rejected. Heads trained later are rolled out as usual.",
    button: "Roll back",
    options: (head) => ({ version: head }),
  },
  promote: {
    title: () => "Promote the candidate?",
    text: "The candidate is rolled out to all devices without waiting for its canaries.",
    button: "Promote",
    options: () => ({}),
  },
  release: {
    title: (device) => `Release ${device} from quarantine?`,
    text: "Its prototypes are used for training from now on, whatever it uploads, until it is revoked.",
    button: "Release",
    options: (device) => ({ device }),
  },
  forget: {
    title: (device) => `Delete the submissions of ${device}?`,
    text: "The head is made again without them. The device may upload again: to prevent that, revoke it first.",
    button: "Delete",
    options: (device) => ({ device }),
  },
  revoke: {
    title: (device) => `Revoke ${device}?`,
    text: "Its messages are refused and its submissions are not used for training. Enrolling it again ends this.",
    button: "Revoke",
    options: (device) => ({ device }),
  },
  link: {
    title: () => "Add a device",
    text: "Makes a link that is good for one device and 15 minutes: a phone opens it, a box joins with it.",
    button: "Make the link",
    note: OpenFleet,
    fields: [
      ["device", "Name", { pattern: "[A-Za-z0-9_\\-]{1,64}", title: "letters, digits, - and _", placeholder: "optional: the device chooses it" }],
      ["broker", "Broker as seen from a box", { placeholder: "HOST or HOST:PORT, optional" }],
      ["renew", "Replace the keys of an enrolled device", { type: "checkbox" }],
    ],
    options: (_, form) => ({
      url: new URL(".", location.href).href,
      device: form.get("device"),
      broker: form.get("broker").trim(),
      renew: form.get("renew") === "on",
    }),
    outcome: MadeLink,
  },
  enroll: {
    title: () => "Enroll a device",
    text: "The file that is downloaded has the device's private keys, and no copy of it stays on the server.",
    button: "Enroll and download",
    note: OpenFleet,
    fields: [
      ["device", "Name", { required: true, pattern: "[A-Za-z0-9_\\-]{1,64}", title: "letters, digits, - and _" }],
      ["broker", "Broker as seen from the device", { placeholder: "HOST or HOST:PORT, optional" }],
      ["renew", "Replace the keys of an enrolled device", { type: "checkbox" }],
    ],
    options: (_, form) => ({
      device: form.get("device"),
      broker: form.get("broker").trim(),
      renew: form.get("renew") === "on",
    }),
  },
};

const isLocal = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);

/** What enrolling changes in an open fleet, which this machine joins without a link: its page is served here only. */
function OpenFleet() {
  const { status } = fleet;
  if (!status || status.enrollment.closed) return null;
  const values = new URLSearchParams({ fleet: status.fleet, key: status.aggregator_key });
  return html`<p>The first device that is enrolled closes the fleet: devices that are not enrolled are refused from then on.</p>
    ${isLocal && html`<p>Until then, <a href=${`join/#${values}`} target="_blank">this browser</a> can join without a link.</p>`}`;
}

function MadeLink({ made: { link, qr } }) {
  return html`<p>Good for one device and 15 minutes; whoever has it can use it.</p>
    ${isLocal && html`<p>Only this machine reaches <code>${location.host}</code>: for other devices, open the dashboard under its name.</p>`}
    <img class="code" src=${`data:image/svg+xml,${encodeURIComponent(qr)}`} alt="QR code of the link" />
    <label>Link <input readonly value=${link} onFocus=${(event) => event.target.select()} /></label>
    <label>On a box <input readonly value=${`edge-client join '${link}'`} onFocus=${(event) => event.target.select()} /></label>`;
}

let open = () => {};

/** Ask for the confirmation of a command about a device or a head. */
export function ask(name, subject = null) {
  open({ name, subject });
}

export function openSignIn() {
  open({ name: "sign in", subject: null });
}

function Field({ name, label, options }) {
  const input = html`<input name=${name} autocomplete="off" ...${options} />`;
  return options.type === "checkbox"
    ? html`<label class="check">${input} ${label}</label>`
    : html`<label>${label} ${input}</label>`;
}

function Token() {
  return html`<label>
    Token
    <input type="password" name="token" required autocomplete="current-password" />
    <span class="quiet">That of --http-token-file; without one, of the file http-token in the state folder.</span>
  </label>`;
}

function Confirmation({ asked, close, say }) {
  const { name, subject } = asked;
  const kind = COMMANDS[name];
  const dialog = useRef();
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const [made, setMade] = useState(null);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  async function carryOut(event) {
    event.preventDefault();
    const form = new FormData(event.target);
    setBusy(true);
    setProblem("");
    try {
      if (form.has("token")) await signIn(form.get("token"));
      const done = kind && (await command(name, kind.options(subject, form)));
      if (kind?.outcome) return setMade(done);
      if (kind) say(done);
      close();
    } catch (error) {
      setProblem(error.message);
      setBusy(false);
    }
  }
  if (made)
    return html`<dialog ref=${dialog} onClose=${close} aria-labelledby="dialog-title">
      <h2 id="dialog-title">${kind.title(subject)}</h2>
      <${kind.outcome} made=${made} />
      <div class="tools"><button type="button" onClick=${() => dialog.current.close()}>Close</button></div>
    </dialog>`;
  return html`<dialog ref=${dialog} onClose=${close} aria-labelledby="dialog-title">
    <form onSubmit=${carryOut}>
      <h2 id="dialog-title">${kind ? kind.title(subject) : "Sign in"}</h2>
      ${kind && html`<p>${kind.text}</p>`}
      ${kind?.note && html`<${kind.note} />`}
      ${kind?.fields?.map(([field, label, options]) => html`<${Field} key=${field} name=${field} label=${label} options=${options} />`)}
      ${!fleet.session.command && html`<${Token} />`}
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <div class="tools">
        <button type="submit" class="primary" disabled=${isBusy}>${kind ? kind.button : "Sign in"}</button>
        <button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
      </div>
    </form>
  </dialog>`;
}

/** The open dialog, and the outcome of the last command. */
export function Dialogs() {
  const [asked, setAsked] = useState(null);
  const [outcome, setOutcome] = useState("");
  useEffect(() => {
    open = setAsked;
  }, []);
  return html`<div role="status" class="outcome">
      ${outcome && html`<p>${outcome} <button onClick=${() => setOutcome("")}>Close</button></p>`}
    </div>
    ${asked && html`<${Confirmation} asked=${asked} close=${() => setAsked(null)} say=${setOutcome} key=${asked.name + asked.subject} />`}`;
}

/** The page of a browser that may not read. */
export function SignIn() {
  const [problem, setProblem] = useState("");
  async function submit(event) {
    event.preventDefault();
    try {
      await signIn(new FormData(event.target).get("token"));
    } catch (error) {
      setProblem(error.message);
    }
  }
  return html`<form class="sign-in" onSubmit=${submit}>
    <h2>Sign in</h2>
    <${Token} />
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <button type="submit" class="primary">Sign in</button>
  </form>`;
}
