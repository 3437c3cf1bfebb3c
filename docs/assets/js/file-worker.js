/* A page that was opened from a disk may not start a worker, and the search runs in one. There it runs in a hidden frame
   instead, which has what the search asks of a worker: messages in, messages out, scripts. From a server nothing changes. */
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
