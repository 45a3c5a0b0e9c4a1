// Pictures: a head of 24 bytes (real/console/video.py), then a JPEG. Each is acknowledged once it is drawn.

export class Videos {
  constructor(place, link, clock) {
    [this.place, this.link, this.clock] = [place, link, clock];
    this.cameras = [];
  }

  set(names) {
    if (names.join() === this.cameras.map((c) => c.name).join()) return;
    this.cameras = names.map((name) => {
      const box = document.createElement("div");
      const canvas = document.createElement("canvas");
      const line = document.createElement("p");
      const [title, age] = [document.createElement("span"), document.createElement("span")];
      title.textContent = name;
      age.textContent = "no picture yet";
      box.className = "video stale";
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `camera ${name}`);
      line.append(title, age);
      box.append(canvas, line);
      return { name, box, canvas, age, capture: null, number: -1, drawing: false };
    });
    this.place.replaceChildren(...this.cameras.map((c) => c.box));
  }

  async hear(buffer) {
    const head = new DataView(buffer, 0, 24);
    if (head.getUint8(0) !== 86 || head.getUint8(1) !== 1) return;
    const camera = this.cameras[head.getUint8(2)];
    const [number, capture] = [head.getUint32(4), head.getFloat64(8)];
    if (!camera) return;
    try {
      const picture = await createImageBitmap(new Blob([new Uint8Array(buffer, 24)], { type: "image/jpeg" }));
      if (number > camera.number) {
        if (camera.canvas.width !== picture.width || camera.canvas.height !== picture.height)
          Object.assign(camera.canvas, { width: picture.width, height: picture.height });
        camera.canvas.getContext("2d").drawImage(picture, 0, 0);
        [camera.number, camera.capture] = [number, capture];
      }
      picture.close();
    } finally {
      this.link().send("seen", { camera: head.getUint8(2), number });
    }
  }

  restart() {
    for (const camera of this.cameras) [camera.number, camera.capture] = [-1, null];
  }

  // Names of the cameras whose newest picture is older than `limit` seconds, and their ages on the page.
  stale(limit, facts) {
    const offset = this.link().offset;
    return this.cameras.filter((camera, i) => {
      const age = camera.capture === null || offset === null ? null : Math.max(0, this.clock() - offset - camera.capture);
      const old = age === null || age > limit;
      const fps = facts?.[i]?.fps;
      camera.box.classList.toggle("stale", old);
      const text = age === null ? "no picture yet" : old ? `OLD: ${age.toFixed(1)} s` : `${(1000 * age).toFixed(0)} ms${fps ? ` · ${fps} fps` : ""}`;
      if (camera.age.textContent !== text) camera.age.textContent = text;
      return old;
    }).map((camera) => camera.name);
  }
}
