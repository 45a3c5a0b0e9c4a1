// What the operator's hands do: keyboard, two pads for mouse or finger, gamepad. Each has its own dead-man, and only what is
// held counts. After anything was let go by force (focus lost, page hidden, pad unplugged, locked) it has to be pressed anew.

const DEAD_ZONE = 0.15;
const AXES = { forward: [0, 1], back: [0, -1], left: [1, 1], right: [1, -1], up: [2, 1], down: [2, -1], roll_left: [3, -1],
  roll_right: [3, 1], pitch_up: [4, -1], pitch_down: [4, 1], turn_left: [5, 1], turn_right: [5, -1] };
// the buttons of a standard gamepad, as lerobot's teleoperator uses them, and what else an operator needs
const BUTTONS = { 0: "redo", 1: "failure", 2: "hand_back", 3: "success", 8: "stop", 9: "pause", 4: "takeover", 16: "estop" };
const RB = 5, CLOSE = 6, OPEN = 7;

const zeros = () => [0, 0, 0, 0, 0, 0];
const clip = (x) => Math.max(-1, Math.min(1, x));
const dead = (x) => (Math.abs(x) < DEAD_ZONE ? 0 : (Math.sign(x) * (Math.abs(x) - DEAD_ZONE)) / (1 - DEAD_ZONE));

class Pad {
  constructor(element, axes, changed) {
    this.element = element;
    this.knob = element.querySelector("i");
    this.axes = axes; // what moving up and moving left mean
    this.changed = changed;
    this.release();
    element.addEventListener("pointerdown", (e) => {
      if (this.pointer !== null || e.button !== 0) return;
      e.preventDefault();
      element.setPointerCapture(e.pointerId);
      [this.pointer, this.x, this.y] = [e.pointerId, e.clientX, e.clientY];
      element.classList.add("held");
      changed();
    });
    element.addEventListener("pointermove", (e) => {
      if (e.pointerId !== this.pointer) return;
      const radius = element.clientWidth / 2 - 10;
      this.value = [clip((this.y - e.clientY) / radius), clip((this.x - e.clientX) / radius)];
      this.knob.style.transform = `translate(${-this.value[1] * radius * 0.6}px, ${-this.value[0] * radius * 0.6}px)`;
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"])
      element.addEventListener(name, (e) => e.pointerId === this.pointer && (this.release(), changed()));
    element.addEventListener("contextmenu", (e) => e.preventDefault());
  }

  release() {
    this.pointer = null;
    this.value = [0, 0];
    this.element.classList.remove("held");
    this.knob.style.transform = "";
  }
}

export class Drive {
  // `act(name)` is called for a gamepad's buttons, `changed()` when something was pressed or let go
  constructor(keys, act, changed) {
    [this.keys, this.act, this.changed] = [keys, act, changed];
    this.held = new Set(); // actions whose key is down
    this.pads = [new Pad(document.getElementById("pad-move"), [0, 1], changed), new Pad(document.getElementById("pad-lift"), [2, 5], changed)];
    this.scale = 1;
    this.gripper = 0;
    this.gamepad = null; // its index, once its dead-man was pressed
    this.anew = false; // the gamepad's dead-man must be let go first
    this.down = new Set();
  }

  key(name, down) {
    if (name !== "dead_man" && !(name in AXES)) return false;
    if (down) this.held.add(name); else this.held.delete(name);
    this.changed();
    return true;
  }

  toggleGripper() {
    this.gripper = this.gripper > 0 ? -1 : 1;
    this.changed();
  }

  release() {
    this.held.clear();
    for (const pad of this.pads) pad.release();
    this.gripper = 0;
    this.anew = true;
  }

  readPad() {
    const pads = [...(navigator.getGamepads?.() ?? [])].filter((p) => p && p.connected && p.mapping === "standard");
    const pad = pads.find((p) => p.index === this.gamepad) ?? pads.find((p) => p.buttons[RB]?.pressed);
    if (pads.length && !pads.some((p) => p.buttons[RB]?.pressed)) this.anew = false;
    if (this.gamepad !== null && pad?.index !== this.gamepad) this.lostPad();
    for (const p of pads) this.buttons(p);
    if (!pad) return null;
    const holds = pad.buttons[RB].pressed;
    this.gamepad = pad.index;
    if (!holds || this.anew) return null;
    if (pad.buttons[CLOSE]?.pressed) this.gripper = 1;
    if (pad.buttons[OPEN]?.pressed) this.gripper = -1;
    const [x, y, u, v] = pad.axes.map(dead);
    const tilt = (pad.buttons[13]?.pressed ? 1 : 0) - (pad.buttons[12]?.pressed ? 1 : 0);
    const roll = (pad.buttons[15]?.pressed ? 1 : 0) - (pad.buttons[14]?.pressed ? 1 : 0);
    return [-y, -x, -v, roll, tilt, -u];
  }

  buttons(pad) {
    for (const [place, name] of Object.entries(BUTTONS)) {
      const id = `${pad.index}:${place}`;
      const pressed = Boolean(pad.buttons[place]?.pressed);
      if (pressed && !this.down.has(id)) this.act(name);
      if (pressed) this.down.add(id); else this.down.delete(id);
    }
  }

  lostPad() {
    this.gamepad = null;
    this.down.clear();
    this.release();
  }

  // The complete state now: {d, a, g, keys}
  read() {
    const axes = zeros();
    const used = [];
    const stick = this.readPad();
    if (this.held.has("dead_man")) {
      used.push("keyboard");
      for (const name of this.held) if (name in AXES) axes[AXES[name][0]] += AXES[name][1];
    }
    for (const pad of this.pads)
      if (pad.pointer !== null) {
        used.push(pad.element.id);
        pad.axes.forEach((axis, i) => (axes[axis] += pad.value[i]));
      }
    if (stick) {
      used.push("gamepad");
      stick.forEach((value, i) => (axes[i] += value));
    }
    return { d: used.length > 0, a: axes.map((x) => clip(x) * this.scale), g: used.length ? this.gripper : 0, keys: [...used, ...this.held].slice(0, 16) };
  }
}
