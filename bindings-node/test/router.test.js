'use strict'

const assert = require('node:assert/strict')
const test = require('node:test')

const { Lease, Router } = require('..')
const { stored } = require('./support/msgpack.js')

const TOKENS = Uint32Array.from({ length: 100 }, (_, index) => index) // six blocks of 16 and a tail of 4

function router(options = {}) {
  const clock = { seconds: 1_000 }
  const router = new Router({ seed: 1, clock: () => clock.seconds, ...options })
  router.addWorker('w1')
  router.addWorker('w2')
  return { router, clock }
}

test('the same prefix goes where it went before', () => {
  const { router: kv } = router()
  const first = kv.select(TOKENS)
  assert.ok(first instanceof Lease)
  assert.equal(first.overlapBlocks, 0)
  assert.equal(first.dpRank, 0)
  assert.equal(first.release({ ok: true, cachedTokens: 0 }), true)
  const again = kv.select(TOKENS)
  assert.equal(again.worker, first.worker)
  assert.equal(again.overlapBlocks, 6)
  assert.equal(again.predictedCachedTokens, 96) // 6 × 16
})

test('release is idempotent and ends the load', () => {
  const { router: kv } = router()
  const lease = kv.select(TOKENS, { allowed: ['w1'] })
  const load = () => kv.workers().map(({ activeRequests }) => activeRequests)
  assert.deepEqual(load(), [1, 0])
  lease.prefillDone()
  lease.outputTokens(40)
  assert.equal(lease.release(), true)
  assert.equal(lease.release(), false)
  assert.equal(kv.finish(lease.id), false)
  lease.prefillDone() // after the end: nothing
  lease.outputTokens(50)
  assert.deepEqual(load(), [0, 0])
  assert.equal(kv.stats().activeLeases, 0)
})

test('a lease is finished by its id from elsewhere', () => {
  const { router: kv } = router()
  const { id } = kv.select(TOKENS)
  assert.equal(typeof id, 'string')
  assert.equal(kv.finish(id, { ok: true, cachedTokens: 0, promptTokens: 100 }), true)
  assert.equal(kv.finish(id), false)
  for (const unknown of ['', 'x', '-1', '99999999999999999999999', '77']) assert.equal(kv.finish(unknown), false)
})

test('a booking outlives its object and ends with its ttl', () => {
  const { router: kv, clock } = router({ leaseSeconds: 10 })
  ;(() => kv.select(TOKENS))()
  kv.select(TOKENS, { ttl: 2 })
  globalThis.gc?.()
  assert.equal(kv.stats().activeLeases, 2)
  clock.seconds += 3
  assert.equal(kv.stats().activeLeases, 1)
  clock.seconds += 8
  assert.equal(kv.stats().activeLeases, 0)
  assert.equal(kv.stats().expiredLeases, 2)
})

test('progress extends a lease', () => {
  const { router: kv, clock } = router({ leaseSeconds: 10 })
  const lease = kv.select(TOKENS)
  for (let second = 0; second < 30; second += 6) {
    clock.seconds += 6
    lease.outputTokens(second + 1)
  }
  assert.equal(kv.stats().activeLeases, 1)
})

test('a request that never left takes its placement back', () => {
  const { router: kv } = router()
  kv.select(TOKENS).release({ dispatched: false })
  assert.deepEqual(kv.overlap(TOKENS), [])
})

test('selecting again under a live name supersedes, booking is refused', () => {
  const { router: kv } = router()
  const first = kv.select(TOKENS, { requestId: 'r1' })
  const second = kv.select(TOKENS, { requestId: 'r1' })
  assert.notEqual(first.id, second.id)
  assert.equal(first.release(), false)
  assert.throws(() => kv.book('r1', 'w1', TOKENS), { code: 'invalid_request', message: /"r1"/ })
  assert.equal(second.release(), true)
  const booked = kv.book('r1', 'w2', TOKENS)
  assert.equal(booked.worker, 'w2')
})

test('nothing is selected when no worker is eligible', () => {
  const { router: kv } = router()
  assert.equal(kv.select(TOKENS, { allowed: [] }), null)
  assert.equal(kv.select(TOKENS, { allowed: ['elsewhere', ''] }), null)
  kv.drainWorker('w1')
  kv.removeWorker('w2')
  assert.equal(kv.select(TOKENS), null)
  assert.deepEqual(kv.workers().map(({ id, draining }) => [id, draining]), [['w1', true]])
})

test('a worker is changed without a new life', () => {
  const { router: kv } = router()
  kv.ingest('w1', stored([11, 12], 0), { seq: 0 })
  kv.drainWorker('w1')
  assert.equal(kv.select(TOKENS, { allowed: ['w1'] }), null)
  kv.undrainWorker('w1')
  kv.setRole('w1', 'prefill')
  assert.equal(kv.select(TOKENS, { allowed: ['w1'], role: 'decode' }), null)
  kv.setLabels('w1', { zone: 'b' })
  const [changed] = kv.workers()
  assert.deepEqual([changed.id, changed.draining, changed.role, changed.labels], ['w1', false, 'prefill', { zone: 'b' }])
  assert.equal(kv.select(TOKENS, { allowed: ['w1'], role: 'prefill' }).overlapBlocks, 2)
  kv.setLabels('w1', {})
  assert.deepEqual(kv.workers()[0].labels, {})
})

test('roles and ranks filter', () => {
  const { router: kv } = router()
  kv.addWorker('p', { role: 'prefill', dpRanks: 3 })
  assert.equal(kv.rank(TOKENS).length, 5) // w1, w2 and three ranks of p
  assert.equal(kv.rank(TOKENS, { role: 'decode' }).length, 2)
  assert.equal(kv.select(TOKENS, { dpRank: 2 }).worker, 'p')
  assert.equal(kv.book('r', 'p', TOKENS, { dpRank: 1 }).dpRank, 1)
})

test('events are credited, by tier', () => {
  const { router: kv } = router()
  assert.deepEqual(kv.ingest('w1', stored([11, 12], 0), { seq: 0 }), {
    applied: 1,
    skipped: {},
    gap: false,
    restarted: false,
  })
  assert.deepEqual(kv.overlap(TOKENS), [{ worker: 'w1', dpRank: 0, device: 2, host: 0, disk: 0, external: 0 }])
  assert.equal(kv.trust('w1').state, 'exact')
  assert.equal(kv.ingest('w1', stored([11, 12], 0), { seq: 0n }).skipped.duplicate_batch, 1)
  assert.equal(kv.ingest('w1', stored([13], 32, 12), { seq: 2n }).gap, true)
  kv.clear('w1')
  assert.deepEqual(kv.overlap(TOKENS), [])
})

test('an undecodable batch changes nothing and says so', () => {
  const { router: kv } = router()
  kv.ingest('w1', stored([11, 12], 0))
  assert.deepEqual(kv.ingest('w1', Buffer.from('not msgpack')).skipped, { undecodable: 1 })
  assert.equal(kv.overlap(TOKENS)[0].device, 2)
})

test('placements are recorded, for a while', () => {
  const { router: kv, clock } = router()
  kv.record('w2', TOKENS, { ttl: 5 })
  assert.equal(kv.overlap(TOKENS)[0].worker, 'w2')
  clock.seconds += 6
  assert.deepEqual(kv.overlap(TOKENS), [])
})

test('salt, adapter and media keep prompts apart', () => {
  const { router: kv } = router()
  const media = [{ offset: 0, length: 8, digest: Buffer.from('cat') }]
  kv.record('w1', TOKENS, { salt: 'a' })
  kv.record('w2', TOKENS, { lora: 'a', media })
  assert.equal(kv.overlap(TOKENS).length, 0)
  assert.equal(kv.overlap(TOKENS, { salt: 'a' })[0].worker, 'w1')
  assert.equal(kv.overlap(TOKENS, { lora: 'a', media })[0].worker, 'w2')
})

test('text and chats match among themselves', () => {
  const { router: kv } = router()
  const text = 'word '.repeat(100)
  const messages = [{ role: 'user', content: text }]
  kv.record('w1', text)
  kv.record('w2', { messages, tools: [{ type: 'function' }] })
  assert.equal(kv.overlap({ text })[0].worker, 'w1')
  assert.equal(kv.overlap({ messages, tools: [{ type: 'function' }] })[0].worker, 'w2')
  assert.deepEqual(kv.overlap({ messages }), []) // other tools, another prompt
  const longer = [...messages, { role: 'assistant', content: 'yes' }]
  assert.equal(kv.overlap({ messages: longer, tools: [{ type: 'function' }] })[0].worker, 'w2')
})

test('every candidate is explained', () => {
  const { router: kv } = router({ requestWeight: 2 })
  kv.reportLoad('w1', { running: 3, waiting: 1, kvUsage: 0.5 })
  const lease = kv.select(TOKENS)
  assert.equal(lease.worker, 'w2')
  const [w1, w2] = lease.explain()
  assert.deepEqual([w1.worker, w2.worker], ['w1', 'w2'])
  assert.equal(w1.cost.activeRequests, 4) // 3 + 1
  // 6 uncached blocks, and 7 active: those and one for the tail and the output.
  assert.equal(w2.cost.total, 13)
  assert.equal(w2.trust, 'unproven')
})

test('overrides count for one request', () => {
  const { router: kv } = router()
  const { cost } = kv.rank(TOKENS, { overrides: { prefillWeight: 3 } })[0]
  assert.equal(cost.total, 25) // 3 × 6 + 7
})

test('an audit lowers the fidelity of a worker that reports less', () => {
  const { router: kv } = router()
  for (let request = 0; request < 20; request++) {
    kv.select(TOKENS, { allowed: ['w1'] }).release({ ok: true, cachedTokens: 0, promptTokens: 100 })
  }
  assert.ok(kv.trust('w1').fidelity < 0.5)
})

test('a lease explains itself while it lives, and among the last decisions', () => {
  const { router: kv } = router()
  const [live, ended] = [kv.select(TOKENS), kv.select(TOKENS)]
  const explained = ended.explain()
  ended.release()
  assert.deepEqual(ended.explain(), explained)
  for (let call = 0; call < 300; call++) kv.select(TOKENS).release()
  assert.equal(live.explain().length, explained.length)
  assert.throws(() => ended.explain(), { code: 'invalid_request', message: /lease \d+ .* the last few/ })
  kv.close()
  assert.equal(live.explain().length, explained.length)
})

test('only what is allowed is chosen, however it is given', () => {
  const { router: kv } = router()
  assert.equal(kv.select(TOKENS, { allowed: ['w2'] }).worker, 'w2')
  assert.deepEqual(kv.rank(TOKENS, { allowed: ['w2', 'w9'] }).map(({ worker }) => worker), ['w2'])
  for (const allowed of [[], ['w9'], [''], ['w1\0w2'], ['w1\0'], ['w1'.repeat(200)]]) assert.equal(kv.select(TOKENS, { allowed }), null, `${allowed}`)
  for (const allowed of [['w1', 7], [undefined], 'w1', [['w1']]]) assert.throws(() => kv.select(TOKENS, { allowed }), { code: 'invalid_request', message: /allowed/ })
  assert.equal(kv.select(TOKENS, { allowed: null, requestId: 'r' }).worker.length, 2)
  assert.throws(() => kv.select(TOKENS, { allowed: ['w1'], alowed: [] }), { code: 'invalid_request', message: /alowed/ })
})

test('trust tells since when', () => {
  const before = Date.now() / 1_000
  const kv = new Router()
  kv.addWorker('w1')
  const { since } = kv.trust('w1')
  assert.ok(since >= before - 0.1 && since <= Date.now() / 1_000 + 0.1, `${since}`)
  let seconds = 1_000
  const simulated = new Router({ clock: () => seconds })
  seconds = 1_001.5
  simulated.addWorker('w1', { dpRanks: 2 })
  seconds = 1_009
  assert.equal(simulated.trust('w1', 1).since, 1_001.5)
  assert.deepEqual(simulated.workers()[0].trust.map((rank) => rank.since), [1_001.5, 1_001.5])
})

test('labels and capacity are told back', () => {
  const { router: kv } = router()
  kv.addWorker('w3', { labels: { zone: 'a' }, kvCapacityBlocks: 926, dpRanks: 2 })
  const info = kv.workers().find(({ id }) => id === 'w3')
  assert.deepEqual(info.labels, { zone: 'a' })
  assert.equal(info.kvCapacityBlocks, 926)
  assert.equal(info.trust.length, 2)
  assert.equal(kv.workers()[0].kvCapacityBlocks, null)
})

test('options may be null or undefined', () => {
  const kv = new Router(null)
  kv.addWorker('w1', undefined)
  assert.equal(kv.select(TOKENS, { requestId: null, salt: undefined }).worker, 'w1')
})

test('leases and routers are disposable where the runtime knows disposal', { skip: !Symbol.dispose }, () => {
  const { router: kv } = router()
  const lease = kv.select(TOKENS)
  lease[Symbol.dispose]()
  assert.equal(kv.stats().activeLeases, 0)
  kv[Symbol.dispose]()
  assert.throws(() => kv.select(TOKENS), { code: 'closed' })
})
