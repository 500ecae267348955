// A page that is opened from a folder may start no worker: its script runs in a hidden frame instead, so that search
// works there too.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      const load = (source) =>
        new Promise((loaded, failed) => {
          const script = scope.document.createElement("script");
          Object.assign(script, { src: source, onload: loaded, onerror: failed });
          scope.document.body.append(script);
        });
      scope.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope = scope;
      this.loaded = load(new URL(url, location));
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
