// Perfetto's trace processor, compiled to WebAssembly for its UI, run outside of a browser.
// node trace_processor.js FOLDER < requests > replies: streams of perfetto.protos.TraceProcessorRpc. FOLDER is the UI's.
// The UI runs it in a worker, so this looks like one. Left out: everything that it does not ask for.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const node = process;
const folder = node.argv[2];
const requests = fs.readFileSync(0);
node.on("uncaughtException", (error) => {
  console.error(String(error)); // without the source, which is one line of a megabyte
  node.exit(1);
});

globalThis.process = undefined; // it refuses to run in node
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: "engine_bundle.js" };
globalThis.importScripts = () => {};
globalThis.XMLHttpRequest = class {
  open(method, url) {
    this.file = path.join(folder, path.basename(url));
  }
  send() {
    this.response = new Uint8Array(fs.readFileSync(this.file)).buffer;
    this.status = 200;
  }
};
console.log = () => {};
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));

function postMessage(reply) {
  for (let sent = 0; sent < reply.length; ) sent += fs.writeSync(1, reply, sent);
}
const port = { onmessage: null, postMessage };
globalThis.onmessage({ data: port });
// By now it is compiled; what is still to be done follows a promise that is kept.
setTimeout(() => port.onmessage({ data: new Uint8Array(requests) }), 0);
