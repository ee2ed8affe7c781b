// Compiled with `tsc --strict`, as a module; use.cts is the same for `require`. Not run.
import { Router, blockHashes, type Candidate, type ErrorCode, type KvlaneError, type Lease, type Prompt } from '../../index.mjs'

import { Booking, Cooldown, EngineTokenizer, UsageReader, bodyOf, errorBody, promptOf, selectFor, type Usage } from '../../gateway.mjs'

const router = new Router({ blockSize: 16, index: 'events', seed: 7n, clock: () => 0 })
router.addWorker('w1')
router.addWorker('w2', { dpRanks: 2, role: 'prefill', kvCapacityBlocks: 926, labels: { zone: 'a' } })

const prompts: Prompt[] = [
  new Uint32Array(4),
  Buffer.alloc(16),
  new Int32Array(4),
  new BigInt64Array(4),
  [1, 2, 3],
  'text',
  { text: 'text' },
  { messages: [{ role: 'user', content: 'hello' }], tools: [] },
]

for (const prompt of prompts) {
  const lease: Lease | null = router.select(prompt, {
    requestId: 'r1',
    allowed: ['w1'],
    media: [{ offset: 0, length: 4, digest: Buffer.from('00ff', 'hex') }],
    overrides: { temperature: 0.5 },
  })
  if (lease === null) continue
  const place: [string, number, string] = [lease.worker, lease.dpRank, lease.id]
  const costs: number[] = lease.explain().map((candidate: Candidate) => candidate.cost.total)
  lease.prefillDone()
  lease.outputTokens(costs.length + place.length)
  const live: boolean = lease.release({ ok: true, cachedTokens: 0 })
  router.finish(lease.id, { ok: live })
}

const { local, sequence }: { local: BigUint64Array; sequence: BigUint64Array } = blockHashes([1, 2], { blockSize: 2 })
const report = router.ingest('w1', Buffer.alloc(0), { seq: local[0] ?? sequence.length })
const reasons: Record<string, number> = report.skipped
const cause: string | null = router.trust('w1', 0).cause
const ready: Promise<boolean> = router.waitReady({ timeoutMs: 5, signal: AbortSignal.timeout(5) })

try {
  router.clear('w3')
} catch (error) {
  const code: ErrorCode = (error as KvlaneError).code
  console.log(code, reasons, cause, ready)
}

// @ts-expect-error an unknown key
router.select([1], { lorra: 'a' })
router.undrainWorker('w1')
router.setRole('w1', 'decode')
router.setLabels('w1', { zone: 'a' })

// @ts-expect-error a wrong role
router.setRole('w1', 'both-ways')
// @ts-expect-error a wrong role
router.addWorker('w4', { role: 'both-ways' })
// @ts-expect-error floats are no tokens
router.overlap(new Float32Array(4))

const parsed: unknown = bodyOf(new Uint8Array())
const tokens: Uint32Array | undefined = await new EngineTokenizer(['http://127.0.0.1:8000'], { timeoutMs: 100 }).tokens(parsed, { signal: AbortSignal.timeout(1) })
const placed: Lease | null = selectFor(router, parsed, { tokens, allowed: new Cooldown({ seconds: 1 }).allowed(['w1']), requestId: 'r' })
if (placed) {
  const booking = new Booking(placed)
  booking.started(200)
  booking.push(new Uint8Array())
  const usage: Usage | undefined = booking.usage ?? new UsageReader().usage
  booking.complete()
  void [usage?.cachedTokens, errorBody(503, 'no_worker', 'no'), promptOf(parsed).options.salt]
}
