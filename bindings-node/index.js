'use strict'

const native = require('./native.js')
const { Lease } = require('./lib/lease.js')
const { compact, split } = require('./lib/prompt.js')
const { candidatesOf, overlapsOf } = require('./lib/targets.js')

/** How often readiness is looked at. A stream connects in tens of milliseconds. */
const POLL_MS = 10

// A class of the language, since those of napi take a call without `new` as one on the global object.
class Router extends native.Router {
  /** Where the native part writes the numbers of the last booking. */
  #facts = new Float64Array(4)

  constructor(options) {
    super(options)
    this._shareFacts(Buffer.from(this.#facts.buffer))
  }

  record(worker, prompt, options) {
    super.record(worker, compact(prompt), options)
  }

  overlap(prompt, options) {
    return overlapsOf(super.overlap(compact(prompt), options))
  }

  rank(prompt, options) {
    return candidatesOf(super.rank(compact(prompt), ...(split(options) ?? [options])))
  }

  select(prompt, options) {
    const worker = super.select(compact(prompt), ...(split(options) ?? [options]))
    return worker === null ? null : new Lease(this, worker, this.#facts)
  }

  book(requestId, worker, prompt, options) {
    const booked = super.book(requestId, worker, compact(prompt), options)
    return new Lease(this, booked, this.#facts)
  }

  async waitReady({ workers = 1, timeoutMs = Infinity, signal } = {}) {
    signal?.throwIfAborted()
    if (!(timeoutMs >= 0)) {
      throw refused(`timeoutMs ${timeoutMs} is out of range: 0 or more milliseconds are accepted`)
    }
    if (!Number.isInteger(workers) || workers < 0) {
      throw refused(`workers ${workers} is out of range: whole numbers from 0 are accepted`)
    }
    const end = performance.now() + timeoutMs
    while (this.readyWorkers() < workers) {
      const left = end - performance.now()
      if (left <= 0) return false
      await pause(Math.min(POLL_MS, left), signal)
    }
    return true
  }
}

// Where the runtime knows disposal; `using` asks for the symbol itself.
if (Symbol.dispose) {
  Router.prototype[Symbol.dispose] = function dispose() {
    this.close()
  }
}

function blockHashes(prompt, options) {
  return native.blockHashes(compact(prompt), options)
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const onAbort = () => {
      clearTimeout(timer)
      reject(signal.reason)
    }
    const timer = setTimeout(() => {
      signal?.removeEventListener('abort', onAbort)
      resolve()
    }, ms)
    signal?.addEventListener('abort', onAbort, { once: true })
  })
}

function refused(message) {
  return Object.assign(new Error(message), { code: 'invalid_request' })
}

module.exports.Router = Router
module.exports.Lease = Lease
module.exports.blockHashes = blockHashes
module.exports.errorCodes = native.errorCodes
module.exports.version = native.version
module.exports.__napiBindingTarget = native.__napiBindingTarget
