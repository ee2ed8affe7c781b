// The shared-prefix workload through a real Envoy, to two simulated engines: twelve prefixes that one cache cannot hold, each
// sent six times. A repeat is a hit when the engine found all of the shared blocks.

import assert from 'node:assert/strict'
import test from 'node:test'

import { chatWorkload, plainEnvoy, play, startEngine, startEnvoy, tokenWorkload, until } from 'kvlane-example-testing'

import { gateway } from './setup.js'

test('token ids find their prefix, by events', async (t) => {
  const { envoy, leases } = await gateway(t)
  const { hits, repeats } = await play(tokenWorkload(1), '/v1/completions', () => envoy.url)
  t.diagnostic(`${hits} of ${repeats} repeats hit`)
  assert.equal(repeats, 60)
  assert.ok(hits >= 58, `${hits} of 60`)
  await until(() => leases() === 0)
})

test('chats find their prefix without a tokenizer', async (t) => {
  const { envoy, leases } = await gateway(t)
  const { hits, repeats } = await play(chatWorkload(1), '/v1/chat/completions', () => envoy.url)
  t.diagnostic(`${hits} of ${repeats} repeats hit`)
  assert.ok(hits >= 58, `${hits} of 60`)
  await until(() => leases() === 0)
})

test('chats find their prefix with the tokenizer of the engines, by events', async (t) => {
  const { envoy, leases, server } = await gateway(t, { tokenize: true })
  const { hits, repeats } = await play(chatWorkload(1), '/v1/chat/completions', () => envoy.url)
  t.diagnostic(`${hits} of ${repeats} repeats hit`)
  assert.ok(hits >= 58, `${hits} of 60`)
  await until(() => leases() === 0)
  const { fidelity, state } = server.picker.router.trust('w1')
  assert.deepEqual({ fidelity, state }, { fidelity: 1, state: 'exact' })
})

for (const policy of ['ROUND_ROBIN', 'RANDOM'] as const) {
  test(`without kvlane ${policy} misses many of them`, async (t) => {
    const engines = await Promise.all(['w1', 'w2'].map((id) => startEngine(t, id)))
    const envoy = await startEnvoy(t, plainEnvoy(policy, engines.map(({ endpoint }) => endpoint)))
    const { hits, repeats } = await play(tokenWorkload(1), '/v1/completions', () => envoy.url)
    t.diagnostic(`${hits} of ${repeats} repeats hit`)
    assert.ok(hits <= 50, `${hits} of 60`)
  })
}
