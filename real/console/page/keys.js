// Which key does what. Kept per browser; any key can be changed, and all can be turned off.

export const ACTIONS = {
  estop: ["E-stop", "Backquote"], stop: ["Stop", "Escape"], pause: ["Pause", "Space"],
  dead_man: ["Hold to drive", "ShiftLeft"], control: ["Take or give control", "KeyC"],
  takeover: ["Take over", "KeyT"], hand_back: ["Hand back", "KeyH"], start: ["Start policy", "KeyP"],
  success: ["Success", "Enter"], failure: ["Failure", "Backspace"], redo: ["Redo", "KeyR"], end: ["End episode", "KeyN"],
  reset: ["Reset pose", "KeyO"], arm: ["Arm", "KeyL"], disarm: ["Disarm", "KeyI"], ack: ["Acknowledge", "KeyK"],
  estop_clear: ["Release e-stop", "KeyU"], full_speed: ["Full speed", "KeyM"], gripper: ["Gripper", "KeyF"],
  slower: ["Slower", "Minus"], faster: ["Faster", "Equal"], earlier: ["Mark earlier", "BracketLeft"],
  later: ["Mark later", "BracketRight"], keep: ["Keep the mark", "Backslash"], mute: ["Sounds on, off", "KeyB"],
  forward: ["Forward", "KeyW"], back: ["Back", "KeyS"], left: ["Left", "KeyA"], right: ["Right", "KeyD"],
  up: ["Up", "KeyE"], down: ["Down", "KeyQ"], pitch_up: ["Tilt up", "ArrowUp"], pitch_down: ["Tilt down", "ArrowDown"],
  turn_left: ["Turn left", "ArrowLeft"], turn_right: ["Turn right", "ArrowRight"], roll_left: ["Roll left", "Comma"],
  roll_right: ["Roll right", "Period"],
};
const PLACE = "robot-console-keys";
const SHORT = { Space: "Space", ShiftLeft: "Shift", ShiftRight: "R-Shift", Escape: "Esc", Backquote: "`", Backspace: "⌫", Enter: "⏎",
  Minus: "−", Equal: "=", BracketLeft: "[", BracketRight: "]", Backslash: "\\", Comma: ",", Period: ".", ArrowUp: "↑",
  ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→" };

export const keyName = (code) => SHORT[code] ?? code.replace(/^(Key|Digit)/, "");

export class Keys {
  constructor() {
    this.codes = Object.fromEntries(Object.entries(ACTIONS).map(([name, [, code]]) => [name, code]));
    this.on = true;
    try {
      const kept = JSON.parse(localStorage.getItem(PLACE) ?? "{}");
      this.on = kept.on !== false;
      for (const [name, code] of Object.entries(kept.codes ?? {}))
        if (name in ACTIONS && typeof code === "string") this.codes[name] = code;
    } catch { /* the defaults, then */ }
    this.waiting = null; // the action whose key is being chosen
  }

  keep() {
    try { localStorage.setItem(PLACE, JSON.stringify({ on: this.on, codes: this.codes })); } catch { /* for this visit only */ }
  }

  action(code) {
    const found = Object.keys(this.codes).find((name) => this.codes[name] === code);
    return this.on || found === "estop" || found === "stop" ? found : undefined;
  }

  choose(name, code) {
    const other = Object.keys(this.codes).find((n) => this.codes[n] === code);
    if (other) this.codes[other] = this.codes[name]; // they change places, so that nothing is without a key
    this.codes[name] = code;
    this.keep();
  }

  defaults() {
    for (const [name, [, code]] of Object.entries(ACTIONS)) this.codes[name] = code;
    this.keep();
  }

  // Draws the list where keys are changed, and the key on every control.
  show(list) {
    for (const mark of document.querySelectorAll("kbd[data-key]")) mark.textContent = keyName(this.codes[mark.dataset.key]);
    list.replaceChildren(...Object.entries(ACTIONS).map(([name, [label]]) => {
      const button = document.createElement("button");
      const key = document.createElement("kbd");
      key.textContent = this.waiting === name ? "press a key" : keyName(this.codes[name]);
      button.type = "button";
      button.className = this.waiting === name ? "waiting" : "";
      button.append(label, key);
      button.onclick = () => { this.waiting = name; button.blur(); this.show(list); };
      return button;
    }));
  }
}
