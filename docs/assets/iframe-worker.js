// Search from disk: browsers start no workers from file: addresses, so the site's search worker runs
// in a hidden frame. The offline plugin would otherwise load such a script from a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(path) {
      super()
      const address = new URL(path, location.href)
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const load = (from) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          script.src = new URL(from, address)
          script.onload = resolve
          script.onerror = () => reject(new Error(`cannot load ${from}`))
          inside.document.head.append(script)
        })
      // What a worker's global object has.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...paths) =>
        paths.reduce((ready, from) => ready.then(() => load(from)), Promise.resolve())
      this.inside = inside
      this.ready = load(address)
    }

    postMessage(data) {
      this.ready.then(() => {
        this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
      })
    }
  }
}
