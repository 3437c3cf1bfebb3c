/* A page opened from a disk cannot start a worker, but the search needs one. So there the search runs in a hidden
   frame, which provides the functions of a worker that the search uses: messages and scripts. On a server, this file
   changes nothing. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      this.inside = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      frame.addEventListener("load", () => this.begin(frame.contentWindow, String(address)), { once: true });
      document.body.append(frame);
    }
    begin(inside, address) {
      const load = (source) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = source;
        script.onload = done;
        script.onerror = failed;
        inside.document.head.append(script);
      });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      load(address).then(() => {
        this.inside = inside;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }
    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
    terminate() {}
  };
}
