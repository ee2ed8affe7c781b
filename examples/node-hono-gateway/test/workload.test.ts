// The shared-prefix workload through the gateway, to two simulated engines: twelve prefixes that one cache cannot hold, each
// sent six times. A repeat is a hit when the engine found all of the shared blocks.

import assert from 'node:assert/strict'
import test from 'node:test'

import { play, startEngine, testWorkload, tokenWorkload } from 'kvlane-example-testing'

import { start } from './setup.js'

testWorkload(start)

test('without kvlane taking turns misses many of them', async (t) => {
  const engines = await Promise.all(['w1', 'w2'].map((id) => startEngine(t, id)))
  const { hits, repeats } = await play(tokenWorkload(1), '/v1/completions', (index) => engines[index % 2]?.url ?? '')
  t.diagnostic(`${hits} of ${repeats} repeats hit`)
  assert.ok(hits <= 50, `${hits} of 60`)
})
