// Puts the page together: what may be pressed now, what is locked and why, and what goes to the server.
import { Drive } from "./drive.js";
import { Keys } from "./keys.js";
import { Link, now } from "./link.js";
import { Marks } from "./marks.js";
import * as sound from "./sound.js";
import { Videos } from "./video.js";
import { begin, draw, tell, told } from "./view.js";

const TICK = 33; // ms between inputs
const IN_MOTION = ["AUTO", "PAUSED", "RESETTING"]; // where pressing the dead-man takes over
const ANYBODY = ["pause", "stop", "estop"];
const EPISODE = ["AUTO", "HUMAN", "PAUSED"];
const $ = (id) => document.getElementById(id);

let state = null, mine = false, hello = null, down = "connecting", wasDriving = false, lastTick = now(), forced = 0, lastSent = 0, heldUntil = 0, last = "", sure = {};

const keys = new Keys();
const drive = new Drive(keys, press, () => now() - lastSent > 0.008 && tick());
const link = new Link({
  hello(message) {
    hello = message;
    mine = false;
    videos.set(message.cameras);
    videos.restart();
    link.limit = message.link_silence_s;
    begin(message);
  },
  state(message) {
    down = "";
    state = message.s;
    if (mine && !message.you.mine) loseControl("");
    mine = message.you.mine;
    $("link").textContent = `live · ${Math.round(1000 * message.you.rtt)} ms`;
    render();
  },
  said: hear,
  picture: (buffer) => videos.hear(buffer),
  lost(reason) {
    if (down !== reason) down = reason;
    if (mine) loseControl("");
    $("link").textContent = "LOST";
    render();
  },
});
const videos = new Videos($("videos"), () => link, now);
const marks = new Marks($("marks"), () => videos.cameras[0]?.canvas, now, (value, at) => link.send("event", { name: "label", value, at }));

function say(text, refused = false) {
  if (!refused) last = text;
  if (!refused && now() < heldUntil) return; // what was refused or lost stays long enough to be read; then comes the last of these
  heldUntil = refused ? now() + 4 : 0;
  const line = $("said");
  if (line.textContent !== text) line.textContent = text;
  line.className = refused ? "refused" : "";
}

function hear(message) {
  if (message.k === "control") {
    if (message.mine) sound.play("mine");
    mine = message.mine;
    forced = !message.mine && /has control/.test(message.reason) ? now() : 0;
    say(message.mine ? "You have control." : message.reason || "You do not have control.", !message.mine);
    if (!mine) drive.release();
  } else if (message.k === "refused") say(`${message.name ? `${message.name.replace("_", " ")}: ` : ""}${message.reason}`, true);
  else if (message.k === "notice") {
    tell(message);
    say(told(message));
    sound.play({ fault: "fault", estop: "fault", takeover: "human", hand_back: "auto", loss: "fault" }[message.name]);
  }
}

function loseControl(why) {
  mine = false;
  drive.release();
  if (why) say(why, true);
}

// Why nothing can be pressed, or "".
function dead() {
  if (down) return `LINK LOST: ${down}`;
  if (state?.control.lost) return "SUPERVISOR GONE. Use the arm's own emergency button.";
  if (!state?.robot) return "NO ROBOT: the supervisor has said nothing yet.";
  if (state.robot.silent) return `SUPERVISOR SILENT for ${state.robot.age.toFixed(1)} s. Use the arm's own emergency button.`;
  return "";
}

// Why the arm cannot be driven from here, or "".
function locked() {
  const old = videos.stale(hello?.stale_image_s ?? 0.3, state?.cameras);
  if (dead()) return "no link";
  if (!mine) return "take control first";
  if (link.offset === null) return "comparing clocks";
  if (old.length) return `old picture: ${old.join(", ")}`;
  if (!["HUMAN", ...IN_MOTION].includes(state.robot.mode)) return state.robot.mode === "READY" ? "take over to begin an episode by hand" : "the arm is not armed";
  return "";
}

function may(name) {
  if (hello?.watches) return false;
  if (name === "estop") return true;
  if (dead()) return false;
  if (name === "control") return true;
  const { mode, estop, slow, may: rules } = state.robot;
  if (name === "pause" || name === "stop") return true;
  if (!mine) return false;
  if (name === "estop_clear") return estop;
  if (name === "full_speed") return slow && ["READY", "PAUSED"].includes(mode);
  if (name === "success" || name === "failure") return EPISODE.includes(mode) || marks.open !== null; // or of the last one
  if (name === "ack") return rules.includes("ack") && !estop;
  if (name === "gripper") return locked() === "";
  if (name === "reset") return rules.includes("reset") || rules.includes("reset_done");
  return rules.includes(name);
}

const NEXT = { IDLE: "arm", STOPPED: "ack", FAULT: "ack", PAUSED: "hand_back", HUMAN: "hand_back", READY: "start" };

function render() {
  const lost = dead();
  const bar = $("lost");
  if (bar.textContent !== lost) bar.textContent = lost;
  bar.hidden = !lost;
  document.body.classList.toggle("dead", Boolean(lost));
  if (heldUntil && now() >= heldUntil) say(last);
  if (state) draw(state, mine, Boolean(lost));
  const mode = state?.robot?.mode;
  const next = !mine ? "control" : state?.robot?.estop ? "estop_clear" : NEXT[mode];
  for (const button of document.querySelectorAll("[data-do]")) {
    const name = button.dataset.do;
    button.disabled = !may(name);
    button.classList.toggle("next", name === next);
    button.classList.toggle("sure", now() < (sure[name] ?? 0));
  }
  label("control", mine ? "Give control up" : now() - forced < 5 && forced ? "Take it from them (pauses first)" : "Take control");
  label("redo", now() < (sure.redo ?? 0) ? "Press again: discard" : "Redo", "[data-do=redo]");
  label("reset", mode === "RESETTING" ? "Reset is done" : "Reset pose", "[data-do=reset]");
  label("gripper", `Gripper: ${{ 1: "close", 0: "as is", "-1": "open" }[drive.gripper]}`);
  const why = locked();
  if (why) drive.anew = true;
  const box = $("drive");
  box.className = why ? "locked" : wasDriving && mode === "HUMAN" ? "live" : "ready";
  const moves = wasDriving && mode === "HUMAN";
  const head = why ? "Driving is locked" : moves ? "You drive" : wasDriving ? "Held, and nothing moves: let go, then press again" : "Hold to drive";
  if ($("driving").textContent !== head) $("driving").textContent = head;
  if ($("why").textContent !== why) $("why").textContent = why;
}

function label(id, text, selector) {
  const button = selector ? document.querySelector(selector) : $(id);
  if (button.firstChild.textContent !== text) button.firstChild.textContent = text;
}

// A control was pressed, by whatever means.
function press(name, at = now()) {
  if (!may(name)) return (name === "estop" && !hello?.watches) || say(`${name.replace("_", " ")}: not now${mine || dead() ? "" : ", you do not have control"}`, true);
  if (name === "estop") {
    link.send("event", { name, value: "", at });
    fetch("/estop", { method: "POST" }).catch(() => say("The e-stop did not get through: use the arm's own button.", true));
    drive.release();
  } else if (name === "control") {
    const force = now() - forced < 5 && forced > 0;
    forced = 0;
    link.send("control", { ask: mine ? "release" : "request", force, who: $("name").value.slice(0, 24) });
    if (mine) drive.release();
  } else if (name === "gripper") drive.toggleGripper();
  else if ((name === "success" || name === "failure") && !EPISODE.includes(state.robot.mode)) marks.call(name);
  else if (name === "success" || name === "failure") {
    link.send("event", { name: "label", value: name, at });
    if (hello?.end_on_label) link.send("event", { name: "end", value: name, at });
    marks.offer(name);
  } else if (name === "redo" && now() > (sure.redo ?? 0)) {
    sure.redo = now() + 2;
    say("Redo discards this episode: press it again within 2 s.", true);
  } else {
    sure = {};
    link.send("event", { name: name === "reset" && state.robot.mode === "RESETTING" ? "reset_done" : name, value: "", at });
  }
  render();
}

function tick() {
  const gap = now() - lastTick;
  lastTick = now();
  if (gap > (hello?.silence_s ?? 0.5) &&  !document.hidden && mine) {
    link.send("control", { ask: "release", force: false, who: "" });
    loseControl(`This page stood still for ${gap.toFixed(1)} s: take control again.`);
  }
  if (locked()) {
    if (drive.read().d) drive.release();
    if (wasDriving || $("drive").className !== "locked") { wasDriving = false; render(); }
    if (mine) send({ d: false, a: [0, 0, 0, 0, 0, 0], g: 0, keys: [] });
    return;
  }
  const input = drive.read();
  if (input.d && !wasDriving && IN_MOTION.includes(state.robot.mode)) link.send("event", { name: "takeover", value: "dead-man", at: now() });
  wasDriving = input.d;
  send(input);
}

function send(input) {
  lastSent = now();
  link.send("input", input);
}

function letGo() {
  drive.release();
  wasDriving = false;
  if (mine) send({ d: false, a: [0, 0, 0, 0, 0, 0], g: 0, keys: [] });
}

function leave() {
  letGo();
  if (mine) link.send("control", { ask: "release", force: false, who: "" });
  mine = false;
}

addEventListener("keydown", (e) => {
  if (keys.waiting) {
    e.preventDefault();
    if (e.code !== "Tab") keys.choose(keys.waiting, e.code);
    keys.waiting = null;
    return keys.show($("keylist"));
  }
  const name = keys.action(e.code);
  const writing = e.target.matches?.("input:not([type=checkbox], [type=range])");
  if (!name || e.ctrlKey || e.metaKey || e.altKey || (writing && name !== "estop" && name !== "stop")) return;
  if (e.code === "Enter" && e.target.matches?.("button, summary, input")) return; // the focused control's own
  if (e.code.startsWith("Arrow") && e.target.matches?.("input")) return;
  e.preventDefault();
  if (e.repeat || drive.key(name, true)) return;
  if (name === "slower" || name === "faster") speed(Number($("speed").value) + (name === "faster" ? 10 : -10));
  else if (name === "earlier" || name === "later") marks.move(name === "later" ? 1 : -1);
  else if (name === "keep") marks.close();
  else if (name === "mute") $("sound").click();
  else press(name);
}, { capture: true });
addEventListener("keyup", (e) => {
  const name = keys.action(e.code);
  if (e.code === "Space" && e.target.matches?.("button")) e.preventDefault(); // Space pauses, whatever has the focus
  if (name) drive.key(name, false);
}, { capture: true });
addEventListener("blur", letGo);
addEventListener("gamepaddisconnected", () => { drive.lostPad(); letGo(); });
addEventListener("pagehide", leave);
document.addEventListener("visibilitychange", () => document.hidden && leave());

// Before anything else hears of a press: the e-stop does not wait for a click to end.
$("estop").addEventListener("pointerdown", () => press("estop"));
$("estop").addEventListener("click", (e) => e.detail === 0 && press("estop")); // Enter on the focused button
for (const button of document.querySelectorAll("[data-do]"))
  button.addEventListener("click", (e) => { press(button.dataset.do); if (e.detail) button.blur(); });

$("tasks").addEventListener("change", () => {
  if (mine && !dead()) link.send("event", { name: "task", value: $("tasks").value, at: now() });
  else say("task: not now, you do not have control", true);
  $("tasks").blur();
});

function speed(percent) {
  const value = Math.max(10, Math.min(100, percent));
  $("speed").value = value;
  $("speedtext").textContent = `${value} %`;
  drive.scale = value / 100;
}
$("speed").addEventListener("input", () => speed(Number($("speed").value)));
$("keyson").checked = keys.on;
$("keyson").addEventListener("change", () => { keys.on = $("keyson").checked; keys.keep(); letGo(); });
$("sound").addEventListener("change", () => sound.turn($("sound").checked));
$("keysdefault").addEventListener("click", () => { keys.defaults(); keys.show($("keylist")); });
keys.show($("keylist"));
render();
setInterval(tick, TICK);
