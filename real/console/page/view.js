// Draws the state. Text is written only where it changed, so that screen readers and the layout stay calm.

const MODES = {
  IDLE: ["○", "nothing moves; arm it to begin"], READY: ["◇", "armed, waiting for an episode"],
  AUTO: ["▶", "the policy moves the arm"], HUMAN: ["◉", "the operator moves the arm"],
  PAUSED: ["❚❚", "holding, in an episode"], RESETTING: ["↺", "moving to the start pose"],
  STOPPED: ["■", "stopped; acknowledge to go on"], FAULT: ["▲", "fault; look at the arm"],
};
const $ = (id) => document.getElementById(id);
const show = (id, text) => { const e = $(id); if (e.textContent !== text) e.textContent = text; return e; };
const percent = (x) => (x === null ? "–" : `${Math.round(100 * x)} %`);
const numbers = (list, digits) => (list.length ? list.map((x) => (x === null ? "∞" : x.toFixed(digits))).join("  ") : "–");

let hello = { actions: [], stages: [] };

export function begin(message) {
  hello = message;
  show("robot", message.robot || "–");
  show("checkpoint", message.checkpoint || "no policy");
  document.body.classList.toggle("watches", Boolean(message.watches));
  $("choose").hidden = message.tasks.length < 2 || Boolean(message.watches);
  $("tasks").replaceChildren(...message.tasks.map((text) => new Option(text, text)));
  $("story").replaceChildren();
  message.story.forEach(tell);
  $("gate").replaceChildren(...message.stages.map((name) => {
    const line = document.createElement("div");
    line.className = "stage";
    line.append(document.createElement("span"), document.createElement("span"));
    line.firstChild.textContent = name;
    return line;
  }));
}

const STORY = 60; // lines that are kept

export const told = (n) => `${n.name.replace("_", " ")}${n.value ? `: ${n.value}` : ""} (${n.by})`;

// Something that happened, the newest on top.
export function tell(news) {
  const line = document.createElement("li");
  const mode = document.createElement("b");
  mode.textContent = news.mode;
  line.append(mode, ` ${told(news)}`);
  $("story").prepend(line);
  while ($("story").children.length > STORY) $("story").lastChild.remove();
}

function holderText(s, mine) {
  if (mine) return "you";
  if (s.control.page) return s.control.who === s.control.page ? s.control.who : `${s.control.who} (${s.control.page})`;
  const holder = s.robot?.holder;
  return holder && holder !== "console" ? holder : "nobody";
}

// `dead`: what is shown is what was last heard, and may no longer be so.
export function draw(s, mine, dead) {
  const r = s.robot;
  const mode = r?.mode ?? "";
  if ($("mode").dataset.mode !== mode) $("mode").dataset.mode = mode;
  show("modename", `${mode || "NO ROBOT"}${dead ? "?" : ""}`);
  $("mode").classList.toggle("old", dead);
  show("shape", MODES[mode]?.[0] ?? "–");
  show("modetext", dead ? "as last heard; unknown now" : mode === "HUMAN" && r.holding ? "the operator has the arm; it holds" : MODES[mode]?.[1] ?? "");
  show("who", holderText(s, mine)).classList.toggle("mine", mine);
  const disk = show("disk", s.disk === null ? "–" : s.disk.gb === null ? "not found" : `${s.disk.gb} GB left`);
  disk.classList.toggle("bad", Boolean(s.disk?.low));
  $("estop").classList.toggle("pressed", Boolean(r?.estop));
  show("estopname", r?.estop ? "E-STOP is on" : "E-STOP");
  show("share", percent(s.share.episode));
  show("shareall", percent(s.share.session));
  show("takeovers", String(s.share.takeovers));
  show("label", s.label || "none yet");
  show("task", s.task || "–").title = s.task;
  if (s.task && $("tasks").value !== s.task && document.activeElement !== $("tasks")) $("tasks").value = s.task;
  for (const [name, count] of Object.entries(s.counts)) show(name, String(count));
  show("cause", s.why && `${mode}: ${s.why}`).hidden = !s.why || dead;
  drawProgress(s.progress);
  const call = show("help", s.help);
  call.hidden = !s.help;
  if (r) drawRobot(r);
}

function drawProgress({ model, curve }) {
  show("model", model);
  const line = $("line");
  const last = curve[curve.length - 1];
  show("progress", last ? `${Math.round(100 * last[1])} % after step ${last[0]}` : model ? "nothing scored yet" : "no reward model");
  const longest = Math.max(1, last?.[0] ?? 1);
  const path = curve.map(([x, y], i) => `${i ? "L" : "M"}${((240 * x) / longest).toFixed(1)} ${(78 - 76 * Math.max(0, Math.min(1, y))).toFixed(1)}`).join("");
  if (line.getAttribute("d") !== path) line.setAttribute("d", path);
}

function drawRobot(r) {
  show("episode", r.episode ? String(r.episode) : "none yet");
  show("clock", r.clock === null ? "–" : `${r.clock.toFixed(1)} s · step ${r.step}`);
  show("version", r.version || "–");
  show("queue", String(r.queue));
  show("pose", numbers(r.pose.slice(0, 3), 3));
  show("joints", numbers(r.joints, 2));
  show("opening", percent(r.gripper));
  show("force", r.wrench.length ? numbers(r.wrench.slice(0, 3), 1) : "no sensor");
  show("late", r.lateness.toFixed(1));
  show("overruns", String(r.overruns));
  const rows = $("actions").tBodies[0];
  const asked = r.is_human ? r.human : r.policy;
  while (rows.rows.length < hello.actions.length) rows.insertRow().append(...[0, 1, 2].map(() => document.createElement("td")));
  hello.actions.forEach((name, i) => {
    const [a, b, c] = rows.rows[i].cells;
    const values = [asked[i], r.sent[i]];
    for (const [cell, text] of [[a, name], [b, values[0]?.toFixed(3) ?? "–"], [c, values[1]?.toFixed(3) ?? "–"]])
      if (cell.textContent !== text) cell.textContent = text;
    c.classList.toggle("cut", values.every(Number.isFinite) && Math.abs(values[0] - values[1]) > 1e-3);
  });
  [...$("gate").children].forEach((line, i) => {
    const name = hello.stages[i];
    const on = r.gate.includes(name);
    line.classList.toggle("on", on);
    const text = `${on ? "clips · " : ""}${r.clipped[name] ?? 0}`;
    if (line.lastChild.textContent !== text) line.lastChild.textContent = text;
  });
  drawFaults(r);
}

function drawFaults(r) {
  const box = $("faults");
  const list = r.faults.map((f) => `${f.name}\n${f.remedy}`);
  if (r.slow && r.mode !== "FAULT") list.push("The arm is slow\nSince a fault. Full speed is given by hand, in READY or PAUSED.");
  if (box.dataset.list === list.join("\n\n")) return;
  box.dataset.list = list.join("\n\n");
  box.hidden = list.length === 0;
  box.replaceChildren(...list.map((text) => {
    const [name, remedy] = text.split("\n");
    const line = document.createElement("div");
    const title = document.createElement("b");
    line.className = "fault";
    title.textContent = name;
    line.append(title, remedy);
    return line;
  }));
}
