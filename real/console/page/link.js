// The connection to the server: numbered messages, heartbeats both ways, and the page's own sense of silence. A browser
// answers a WebSocket's pings while its page stands still, and never tells a page that the network is gone.

const GIVE_UP = 3; // seconds after which a silent connection is replaced

export const now = () => performance.now() / 1000;

export class Link {
  // `on` has hello(m), state(m), said(m), picture(buffer), lost(reason)
  constructor(on) {
    this.on = on;
    this.offset = null; // this page's clock less the server's
    this.alive = false;
    this.n = 0;
    this.limit = 0.35; // seconds without a word from the server until the link counts as lost
    this.open();
    setInterval(() => this.watch(), 40);
    setInterval(() => this.beat(), 250);
  }

  open() {
    this.nonce = null;
    this.heard = now();
    this.stamp = null;
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const socket = (this.socket = new WebSocket(`${scheme}//${location.host}/ws`));
    socket.binaryType = "arraybuffer";
    socket.onmessage = (event) => socket === this.socket && this.hear(event.data);
    socket.onclose = (event) => socket === this.socket && this.closed(event);
  }

  closed(event) {
    this.nonce = null;
    this.down(event.code === 1008 ? "this page sent too much" : "the console is gone");
    this.socket = null;
    setTimeout(() => this.socket === null && this.open(), 1000);
  }

  hear(data) {
    this.heard = now();
    if (typeof data !== "string") return this.on.picture(data);
    const message = JSON.parse(data);
    if (message.k === "hello") {
      this.nonce = message.nonce;
      this.on.hello(message);
    } else if (message.k === "state") {
      this.stamp = message.you.stamp;
      this.seen = this.heard;
      this.offset = message.you.offset;
      if (this.offset === null) this.beat(); // until the clocks are compared nothing may be driven
      this.alive = true;
      this.on.state(message);
    } else this.on.said(message);
  }

  watch() {
    const silent = now() - this.heard;
    if (silent > this.limit) this.down(`no word from the console for ${silent.toFixed(1)} s`);
    if (silent > this.limit + GIVE_UP && this.socket !== null) {
      const old = this.socket;
      this.socket = null;
      old.close();
      this.open();
    }
  }

  down(reason) {
    this.alive = false;
    this.on.lost(reason);
  }

  beat() {
    if (this.stamp !== null && this.stamp !== undefined) this.send("beat", { echo: this.stamp, seen: this.seen });
  }

  send(kind, fields) {
    if (this.nonce === null || this.socket === null || this.socket.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify({ k: kind, c: this.nonce, n: this.n++, t: now(), ...fields }));
    return true;
  }
}
