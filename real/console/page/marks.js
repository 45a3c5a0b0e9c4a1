// A label comes one reaction time late. The last three seconds stay as small pictures; after a label the operator may move
// the mark to the moment that was meant, or call it the other way, and the label is sent again with that time. It goes to
// the episode in which that moment lies, also when that has ended.

const EVERY = 0.25, SECONDS = 3;

export class Marks {
  constructor(place, canvas, clock, send) {
    [this.place, this.canvas, this.clock, this.send] = [place, canvas, clock, send];
    this.shots = [];
    this.open = null; // {value, shots, chosen}
    setInterval(() => this.shoot(), 1000 * EVERY);
  }

  shoot() {
    const source = this.canvas();
    if (!source || !source.width || document.hidden) return;
    const small = document.createElement("canvas");
    Object.assign(small, { width: 72, height: 54 });
    small.getContext("2d").drawImage(source, 0, 0, 72, 54);
    this.shots = [...this.shots, { at: this.clock(), small }].filter((s) => this.clock() - s.at <= SECONDS + EVERY);
  }

  offer(value) {
    const at = this.clock();
    const shots = [...this.shots.filter((s) => at - s.at <= SECONDS), { at, small: null }];
    this.open = { value, at, shots, chosen: shots.length - 1 };
    clearTimeout(this.closing);
    this.closing = setTimeout(() => this.close(), 12000);
    this.draw();
  }

  move(by) {
    if (this.open) this.choose(Math.max(0, Math.min(this.open.shots.length - 1, this.open.chosen + by)));
  }

  choose(i) {
    if (i === this.open.chosen) return;
    this.open.chosen = i;
    this.send(this.open.value, this.open.shots[i].at);
    this.draw();
  }

  call(value) {
    this.open.value = value;
    this.send(value, this.open.shots[this.open.chosen].at);
    this.draw();
  }

  close() {
    this.open = null;
    this.place.hidden = true;
  }

  draw() {
    const { value, at, shots, chosen } = this.open;
    const head = document.createElement("p");
    head.textContent = `${value === "success" ? "✓ Success" : "✗ Failure"} noted. Was it earlier? Move the mark ([ and ]), then keep it (\\).`;
    const buttons = shots.map((shot, i) => {
      const button = document.createElement("button");
      const back = at - shot.at;
      button.type = "button";
      button.setAttribute("aria-pressed", String(i === chosen));
      if (shot.small) button.append(shot.small);
      button.append(back < 0.05 ? "pressed" : `−${back.toFixed(1)} s`);
      button.onclick = () => { this.choose(i); button.blur(); };
      return button;
    });
    const keep = document.createElement("button");
    keep.type = "button";
    keep.className = "keep";
    keep.textContent = "Keep";
    keep.onclick = () => this.close();
    this.place.replaceChildren(head, ...buttons, keep);
    this.place.hidden = false;
  }
}
