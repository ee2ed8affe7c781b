'use strict'

// Drives the cases that every language answers alike; their README says what they mean.

const assert = require('node:assert/strict')
const { readFileSync } = require('node:fs')
const { join } = require('node:path')
const test = require('node:test')

const { Router, blockHashes } = require('..')
const { encode } = require('./support/msgpack.js')

const FILE = join(__dirname, '../../tests/parity/cases.json')
// Integers of more than 53 bits would lose some: they come as BigInt.
const CASES = JSON.parse(
  readFileSync(FILE, 'utf8').replace(/([[:,]\s*)(-?\d{16,})(?=\s*[\],}])/g, '$1{"$int":"$2"}'),
)

for (const { name, prompt, block_size: blockSize, local, sequence, error } of CASES.hashes) {
  test(`hashes: ${name}`, () => {
    const { content, options } = promptOf(prompt)
    const hash = () => blockHashes(content, { ...options, ...(blockSize === undefined ? {} : { blockSize }) })
    if (error) {
      assert.throws(hash, { code: error })
      return
    }
    const hashes = hash()
    assert.deepEqual([...hashes.local].map(hexadecimal), local)
    assert.deepEqual([...hashes.sequence].map(hexadecimal), sequence)
  })
}

for (const scenario of CASES.scenarios) {
  test(`scenario: ${scenario.name}`, () => {
    const state = { seconds: 0, leases: new Map() }
    const options = { ...camel(scenario.config), clock: () => state.seconds }
    if (scenario.error) {
      assert.throws(() => new Router(options), failure(scenario))
      return
    }
    state.router = new Router(options)
    scenario.steps.forEach((step, index) => {
      const where = `step ${index}, ${JSON.stringify(step)}`
      if (step.error) {
        assert.throws(() => run(state, step), failure(step), where)
        return
      }
      const result = run(state, step)
      if ('expect' in step) compare(result, camel(step.expect), where)
    })
  })
}

/** What a step's `do` calls. Those that are not here take a worker's id and options. */
const CALLS = {
  advance: (state, { seconds }) => {
    state.seconds += seconds
  },
  select: (state, args, step) => keep(state, step, state.router.select(...promptAnd(args))),
  book: (state, args, step) => {
    const { requestId, worker, ...rest } = args
    return keep(state, step, state.router.book(requestId, worker, ...promptAnd(rest)))
  },
  overlap: (state, args) => state.router.overlap(...promptAnd(args)),
  rank: (state, args) => state.router.rank(...promptAnd(args)),
  record: (state, { worker, ...rest }) => state.router.record(worker, ...promptAnd(rest)),
  ingest: (state, { worker, payload, batch, ...options }) => {
    const bytes = batch === undefined ? Buffer.from(payload, 'hex') : encode(plain(batch))
    return state.router.ingest(worker, bytes, options)
  },
  explain: (state, _, { lease }) => state.leases.get(lease).explain(),
  prefill_done: (state, _, { lease }) => state.leases.get(lease).prefillDone(),
  output_tokens: (state, { n }, { lease }) => state.leases.get(lease).outputTokens(n),
  release: (state, args, { lease }) => void state.leases.get(lease).release(args),
  finish: (state, { leaseId, ...outcome }, { lease }) =>
    state.router.finish(leaseId ?? state.leases.get(lease).id, outcome),
  clear: (state, { worker, dpRank }) => state.router.clear(worker, dpRank),
  trust: (state, { worker, dpRank }) => state.router.trust(worker, dpRank),
  add_worker: (state, { id, ...options }) => state.router.addWorker(id, options),
  remove_worker: (state, { id }) => state.router.removeWorker(id),
  drain_worker: (state, { id }) => state.router.drainWorker(id),
  undrain_worker: (state, { id }) => state.router.undrainWorker(id),
  set_role: (state, { id, role }) => state.router.setRole(id, role),
  set_labels: (state, { id, labels }) => state.router.setLabels(id, labels),
  report_load: (state, { worker, ...load }) => state.router.reportLoad(worker, load),
  workers: (state) => state.router.workers(),
  stats: (state) => state.router.stats(),
  close: (state) => state.router.close(),
}

function run(state, step) {
  assert.ok(step.do in CALLS, `no call is known as ${step.do}`)
  const { prompt, batch, ...args } = step.with ?? {}
  return CALLS[step.do](state, { ...camel(args), ...(prompt && { prompt }), ...(batch && { batch }) }, step)
}

function keep(state, { lease: name }, lease) {
  if (name) state.leases.set(name, lease)
  if (lease === null) return null
  const { worker, dpRank, overlapBlocks, predictedCachedTokens } = lease
  return { worker, dpRank, overlapBlocks, predictedCachedTokens }
}

function promptAnd({ prompt, ...options }) {
  const read = promptOf(prompt)
  return [read.content, { ...read.options, ...options }]
}

function promptOf({ tokens, text, messages, tools, media, ...options }) {
  if (media) {
    options.media = media.map(([offset, length, hex]) => ({ offset, length, digest: Buffer.from(hex, 'hex') }))
  }
  if (messages) return { content: { messages, tools }, options }
  if (text !== undefined) return { content: repeated(text), options }
  if (Array.isArray(tokens)) return { content: tokens, options }
  return { content: Uint32Array.from({ length: tokens.count }, (_, index) => tokens.start + index), options }
}

function repeated(text) {
  return typeof text === 'string' ? text : text.repeat.repeat(text.times)
}

/** Replaces what stands for something that JSON cannot say. */
function plain(value) {
  if (Array.isArray(value)) return value.map(plain)
  if (value === null || typeof value !== 'object') return value
  if ('$tokens' in value) return Array.from({ length: value.$tokens[1] }, (_, index) => value.$tokens[0] + index)
  if ('$hex' in value) return Buffer.from(value.$hex, 'hex')
  if ('$int' in value) return BigInt(value.$int)
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, plain(item)]))
}

/** Renames the keys of objects as they are called here; what is data (reasons, labels) is left as it is. */
function camel(value) {
  if (Array.isArray(value)) return value.map(camel)
  if (value === null || typeof value !== 'object') return value
  if ('$int' in value) return BigInt(value.$int)
  const rename = ([key, item]) => [
    key.replace(/(?<=[a-z])_([a-z])/g, (_, letter) => letter.toUpperCase()),
    key === 'skipped' || key === 'labels' ? item : camel(item),
  ]
  return Object.fromEntries(Object.entries(value).map(rename))
}

function failure({ error, naming }) {
  return (thrown) => {
    assert.equal(thrown.code, error)
    if (naming) {
      // The name may be the caller's or one that is called otherwise here.
      const names = [naming, Object.keys(camel({ [naming]: 0 }))[0]]
      assert.ok(names.some((name) => thrown.message.includes(name)), `${thrown.message} does not name ${naming}`)
    }
    return true
  }
}

function compare(actual, expected, where) {
  if (Array.isArray(expected)) {
    assert.ok(Array.isArray(actual), where)
    assert.equal(actual.length, expected.length, where)
    expected.forEach((item, index) => compare(actual[index], item, where))
  } else if (expected !== null && typeof expected === 'object') {
    assert.ok(actual !== null && typeof actual === 'object', `${where}: got ${actual}`)
    for (const key of Object.keys(expected)) compare(actual[key], expected[key], `${where}: ${key}`)
  } else if (typeof expected === 'number') {
    assert.ok(Math.abs(actual - expected) <= 1e-9, `${where}: ${actual} is not ${expected}`)
  } else if (typeof expected === 'string' && /^\*.*\*$/.test(expected)) {
    assert.ok(actual.includes(expected.slice(1, -1)), `${where}: ${actual}`)
  } else {
    assert.equal(actual, expected, where)
  }
}

function hexadecimal(hash) {
  return hash.toString(16).padStart(16, '0')
}
