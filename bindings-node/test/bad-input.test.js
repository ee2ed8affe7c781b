'use strict'

const assert = require('node:assert/strict')
const { readFileSync } = require('node:fs')
const { join } = require('node:path')
const test = require('node:test')

const { Router, blockHashes, errorCodes } = require('..')

const TOKENS = new Uint32Array(32)
const DTS = readFileSync(join(__dirname, '../index.d.ts'), 'utf8')

function router() {
  const router = new Router()
  router.addWorker('w1')
  return router
}

/** One call for each code that can be provoked. */
const PROVOKED = {
  config_error: () => new Router({ blokSize: 16 }),
  invalid_request: () => router().select([-1]),
  unknown_worker: () => router().clear('w9'),
  closed: () => {
    const closed = router()
    closed.close()
    closed.select(TOKENS)
  },
}

test('every code of the core is a code here', () => {
  const declared = [...DTS.match(/type ErrorCode = (.*)/)[1].matchAll(/'(\w+)'/g)].map((match) => match[1])
  assert.deepEqual(errorCodes(), declared)
  // Nothing refuses for load as long as there is no admission queue.
  assert.deepEqual(errorCodes().filter((code) => code !== 'overloaded'), Object.keys(PROVOKED))
  for (const [code, call] of Object.entries(PROVOKED)) assert.throws(call, { code })
})

test('a key of the configuration is refused by its name', () => {
  for (const key of ['blokSize', 'block_size', 'constructor', 'BlockSize', '']) {
    assert.throws(() => new Router({ [key]: 16 }), ({ code, message }) => {
      return code === 'config_error' && new RegExp(`unknown field ["\`]${key}["\`]`).test(message)
    })
  }
})

test('the declared keys of the configuration are those of the core', () => {
  const body = DTS.match(/interface RouterOptions \{([\s\S]*?)\n\}/)[1]
  const declared = [...body.matchAll(/^ {2}(\w+)\?:/gm)].map((match) => match[1])
  const { message } = thrown(() => new Router({ unknown: 1 }))
  const known = [...message.matchAll(/`(\w+)`/g)].map((match) => match[1]).filter((key) => key !== 'unknown')
  assert.deepEqual(declared, [...known, 'clock'])
})

test('a value of the configuration is refused with its key', () => {
  const values = {
    blockSize: [0, 65537, 1.5, -1, '16', 2n ** 64n],
    index: ['event', 1],
    ttlSeconds: [0, -1, NaN, Infinity, 'x', true],
    hostHitCredit: [1.5, -0.1],
    silentWorkerRequests: [0, 2 ** 32],
    maxIndexBytes: [1000],
    seed: [-1n, 1.5],
    clock: [1, {}],
  }
  for (const [key, wrong] of Object.entries(values)) {
    for (const value of wrong) {
      assert.throws(
        () => new Router({ [key]: value }),
        (error) => error.code === 'config_error' && error.message.includes(key),
        `${key} ${value}`,
      )
    }
  }
  for (const config of ['text', 5, true]) assert.throws(() => new Router(config), { code: 'config_error' })
})

test('tokens of another type or out of range are refused', () => {
  const wrong = [
    undefined,
    null,
    5,
    5n,
    true,
    Symbol('tokens'),
    () => {},
    {},
    { text: 'a', messages: [] },
    { text: 'a', tools: [] },
    { text: 5 },
    { tools: [] },
    { tokens: [1] },
    { messages: 5 },
    { messages: {} },
    { messages: () => {} },
    { messages: [1n] },
    new Date(),
    new ArrayBuffer(8),
    new DataView(new ArrayBuffer(8)),
    new Float32Array(4),
    new Float64Array(4),
    new Uint16Array(4),
    new BigUint64Array(4),
    Buffer.alloc(5),
    Int32Array.of(1, -1),
    BigInt64Array.of(2n ** 32n),
    BigInt64Array.of(-1n),
    [1, -1],
    [2 ** 32],
    [1.5],
    [NaN],
    ['1'],
    [null],
    [1n],
    // eslint-disable-next-line no-sparse-arrays
    [1, , 2],
  ]
  const kv = router()
  for (const prompt of wrong) {
    const shown = typeof prompt === 'symbol' ? 'symbol' : prompt
    for (const call of [
      () => kv.select(prompt),
      () => kv.rank(prompt),
      () => kv.overlap(prompt),
      () => kv.record('w1', prompt),
      () => kv.book('r', 'w1', prompt),
      () => blockHashes(prompt),
    ]) {
      assert.throws(call, { code: 'invalid_request' }, `${call}: ${JSON.stringify(shown, (_, v) => String(v))}`)
    }
  }
  assert.throws(() => kv.select(Int32Array.of(1, -1)), { message: /tokens\[1\] -1 .* 0 to 4294967295/ })
  assert.equal(kv.stats().activeLeases, 0)
})

test('empty and short prompts are placed by load', () => {
  const kv = router()
  for (const prompt of [new Uint32Array(), [], '', Buffer.alloc(0), [1], { text: '' }, { messages: [] }]) {
    assert.equal(kv.select(prompt).overlapBlocks, 0)
  }
})

test('ten million tokens are placed', () => {
  const kv = router()
  const tokens = new Uint32Array(10_000_000)
  assert.equal(kv.select(tokens).explain()[0].cost.uncachedPrefillBlocks, 625_000) // 10,000,000 / 16
  assert.equal(kv.select(Buffer.from(tokens.buffer)).overlapBlocks, 625_000)
})

test('arguments of another type are refused', () => {
  const kv = router()
  const calls = [
    () => kv.addWorker(),
    () => kv.addWorker(5),
    () => kv.addWorker(''),
    () => kv.addWorker('a\nb'),
    () => kv.addWorker('x'.repeat(257)),
    () => kv.addWorker('w1'),
    () => kv.addWorker('w2', 'options'),
    () => kv.addWorker('w2', { dpRanks: 0 }),
    () => kv.addWorker('w2', { dpRanks: 1.5 }),
    () => kv.addWorker('w2', { dpRanks: -1 }),
    () => kv.addWorker('w2', { dpRanks: 2 ** 32 + 1 }),
    () => kv.addWorker('w2', { kvCapacityBlocks: 0 }),
    () => kv.addWorker('w2', { role: 'all' }),
    () => kv.addWorker('w2', { labels: { a: 1 } }),
    () => kv.addWorker('w2', { labels: 'a' }),
    () => kv.addWorker('w2', { replay: 'tcp://127.0.0.1:1' }),
    () => kv.addWorker('w2', { lables: {} }),
    () => kv.removeWorker(undefined),
    () => kv.drainWorker({}),
    () => kv.undrainWorker(),
    () => kv.setRole('w1'),
    () => kv.setRole('w1', 'chef'),
    () => kv.setRole({}, 'both'),
    () => kv.setLabels('w1'),
    () => kv.setLabels('w1', 'a'),
    () => kv.setLabels('w1', { a: 1 }),
    () => kv.ingest('w1'),
    () => kv.ingest('w1', 'text'),
    () => kv.ingest('w1', new Float32Array(2)),
    () => kv.ingest('w1', Buffer.alloc(1), { seq: -1 }),
    () => kv.ingest('w1', Buffer.alloc(1), { seq: 2 ** 53 }),
    () => kv.ingest('w1', Buffer.alloc(1), { seq: 2n ** 64n }),
    () => kv.ingest('w1', Buffer.alloc(1), { seq: '7' }),
    () => kv.ingest('w1', Buffer.alloc(1), { dpRank: 1 }),
    () => kv.ingest('w1', Buffer.alloc(1), 7),
    () => kv.clear('w1', 1),
    () => kv.clear('w1', 'all'),
    () => kv.trust('w1', -1),
    () => kv.trust('w1', 2 ** 32),
    () => kv.record('w1', TOKENS, { ttl: 0 }),
    () => kv.record('w1', TOKENS, { ttl: NaN }),
    () => kv.record('w1', TOKENS, { ttl: 1e300 }),
    () => kv.select(TOKENS, { ttl: -1 }),
    () => kv.select(TOKENS, { ttl: Infinity }),
    () => kv.select(TOKENS, { lorra: 'a' }),
    () => kv.select(TOKENS, { allowed: 'w1' }),
    () => kv.select(TOKENS, { allowed: [1] }),
    () => kv.select(TOKENS, { allowed: [null] }),
    () => kv.select(TOKENS, { role: 'none' }),
    () => kv.select(TOKENS, { priority: 2 ** 31 }),
    () => kv.select(TOKENS, { requestId: 5 }),
    () => kv.select(TOKENS, { overrides: { temperature: -1 } }),
    () => kv.select(TOKENS, { overrides: { blockSize: 1 } }),
    () => kv.select(TOKENS, { media: {} }),
    () => kv.select(TOKENS, { media: [{ offset: 0, length: 1 }] }),
    () => kv.select(TOKENS, { media: [{ offset: -1, length: 1, digest: Buffer.alloc(1) }] }),
    () => kv.select(TOKENS, { media: [{ offset: 0, length: 1, digest: 'a' }] }),
    () => kv.select(TOKENS, { media: [null] }),
    () => kv.book(undefined, 'w1', TOKENS),
    () => kv.book('r', 5, TOKENS),
    () => kv.finish(5),
    () => kv.finish('1', { cachedTokens: -1 }),
    () => kv.select(TOKENS).release({ ok: 'yes' }),
    () => kv.select(TOKENS).release(true),
    () => kv.select(TOKENS).outputTokens(-1),
    () => kv.select(TOKENS).outputTokens(),
    () => kv.reportLoad('w1', { kvUsage: 1.5 }),
    () => kv.reportLoad('w1', { kvUsage: NaN }),
    () => kv.reportLoad('w1', { running: -1 }),
    () => blockHashes(TOKENS, 16),
  ]
  for (const call of calls) assert.throws(call, { code: 'invalid_request' }, call.toString())
  assert.deepEqual(kv.workers().map(({ id }) => id), ['w1'])
})

test('a worker whose events cannot be followed is not left behind', () => {
  const kv = router()
  assert.throws(() => kv.addWorker('w2', { events: 'port 5557' }), { code: 'config_error', message: /port 5557/ })
  assert.throws(() => kv.addWorker('w2', { blockSize: 0 }), { code: 'config_error' })
  assert.equal(kv.workers().length, 1)
})

test('unknown workers are told as such', () => {
  const kv = router()
  const calls = [
    () => kv.removeWorker('w9'),
    () => kv.drainWorker('w9'),
    () => kv.undrainWorker('w9'),
    () => kv.setRole('w9', 'both'),
    () => kv.setLabels('w9', {}),
    () => kv.clear('w9'),
    () => kv.trust('w9'),
    () => kv.record('w9', TOKENS),
    () => kv.book('r', 'w9', TOKENS),
    () => kv.ingest('w9', Buffer.alloc(1)),
    () => kv.reportLoad('w9', { running: 1 }),
  ]
  for (const call of calls) assert.throws(call, { code: 'unknown_worker', message: /"w9"/ }, call.toString())
})

test('after close everything but releasing is refused', () => {
  const kv = router()
  const lease = kv.select(TOKENS)
  kv.close()
  kv.close()
  const calls = [
    () => kv.select(TOKENS),
    () => kv.rank(TOKENS),
    () => kv.book('r', 'w1', TOKENS),
    () => kv.record('w1', TOKENS),
    () => kv.ingest('w1', Buffer.alloc(1)),
    () => kv.overlap(TOKENS),
    () => kv.workers(),
    () => kv.stats(),
    () => kv.trust('w1'),
    () => kv.clear('w1'),
    () => kv.reportLoad('w1', {}),
    () => kv.removeWorker('w1'),
    () => kv.drainWorker('w1'),
    () => kv.undrainWorker('w1'),
    () => kv.setRole('w1', 'both'),
    () => kv.setLabels('w1', {}),
    () => kv.readyWorkers(),
    () => kv.addWorker('w2'),
    () => kv.addWorker('w2', { events: 'tcp://127.0.0.1:1' }),
  ]
  for (const call of calls) assert.throws(call, { code: 'closed' }, call.toString())
  assert.equal(lease.release(), true)
})

test('a clock that fails is an error, one that goes backwards is not', () => {
  let clock = () => 0
  const kv = new Router({ clock: () => clock() })
  kv.addWorker('w1')
  const lease = kv.select(TOKENS)
  for (const wrong of [() => NaN, () => 'x', () => undefined, () => 1e300]) {
    clock = wrong
    assert.throws(() => kv.select(TOKENS), { code: 'invalid_request', message: /clock/ })
  }
  clock = () => {
    throw new Error('no battery')
  }
  assert.throws(() => lease.release(), { code: 'invalid_request', message: /no battery/ })
  clock = () => -1e300
  assert.equal(lease.release(), true)
})

test('getters and proxies that throw do no harm', () => {
  const kv = router()
  const options = Object.defineProperty({}, 'requestId', {
    enumerable: true,
    get() {
      throw new Error('thrown by a getter')
    },
  })
  assert.throws(() => kv.select(TOKENS, options))
  const proxy = new Proxy({}, { ownKeys: () => { throw new Error('thrown by a proxy') } })
  assert.throws(() => kv.select(TOKENS, proxy))
  const messages = [{ role: 'user', toJSON: () => { throw new Error('thrown by toJSON') } }]
  assert.throws(() => kv.select({ messages }), { code: 'invalid_request', message: /thrown by toJSON/ })
  assert.equal(kv.select(TOKENS).worker, 'w1')
})

test('methods on other objects are refused', () => {
  assert.throws(() => Router.prototype.select.call({}, TOKENS))
  assert.throws(() => Router())
})

function thrown(call) {
  try {
    call()
  } catch (error) {
    return error
  }
  return assert.fail('nothing was thrown')
}
