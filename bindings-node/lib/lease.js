'use strict'

const { candidatesOf } = require('./targets.js')

const OK = {}
const ABSENT = -1

/**
 * A booked request. Its types, and what each member says, are in types.d.ts. Members of the router that begin with `_` are for
 * this class alone.
 */
class Lease {
  #router
  #id
  #worker
  #dpRank
  #overlapBlocks
  #predictedCachedTokens

  constructor(router, worker, [id, dpRank, overlapBlocks, predictedCachedTokens]) {
    this.#router = router
    this.#id = id
    this.#worker = worker
    this.#dpRank = dpRank
    this.#overlapBlocks = overlapBlocks
    this.#predictedCachedTokens = predictedCachedTokens
  }

  get id() {
    return String(this.#id)
  }

  get worker() {
    return this.#worker
  }

  get dpRank() {
    return this.#dpRank
  }

  get overlapBlocks() {
    return this.#overlapBlocks
  }

  get predictedCachedTokens() {
    return this.#predictedCachedTokens
  }

  explain() {
    return candidatesOf(this.#router._explain(this.#id))
  }

  prefillDone() {
    this.#router._prefillDone(this.#id)
  }

  outputTokens(tokens) {
    this.#router._outputTokens(this.#id, tokens)
  }

  release(outcome = OK) {
    // What is wrong with an outcome is told where every argument is read.
    if (!isPlain(outcome)) return this.#router._releaseWith(this.#id, outcome)
    const { ok = true, dispatched = true, cachedTokens = ABSENT, promptTokens = ABSENT } = outcome
    return this.#router._release(this.#id, ok, dispatched, cachedTokens, promptTokens)
  }
}

/** Tells whether an outcome holds nothing but known keys with values of their types. */
function isPlain(outcome) {
  if (typeof outcome !== 'object' || outcome === null) return false
  for (const key in outcome) {
    const value = outcome[key]
    if (key === 'ok' || key === 'dispatched') {
      if (typeof value !== 'boolean') return false
    } else if ((key !== 'cachedTokens' && key !== 'promptTokens') || value >>> 0 !== value) return false
  }
  return true
}

// Where the runtime knows disposal; `using` asks for the symbol itself.
if (Symbol.dispose) {
  Lease.prototype[Symbol.dispose] = function dispose() {
    this.release({ ok: false })
  }
}

module.exports.Lease = Lease
