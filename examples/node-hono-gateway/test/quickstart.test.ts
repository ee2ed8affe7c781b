import assert from 'node:assert/strict'
import test from 'node:test'

import { answerOf, quickstart } from 'kvlane-example-testing'

test('what the README shows works', async (t) => {
  const gateway = await quickstart(t, new URL('../../', import.meta.url), new URL('../src/main.js', import.meta.url))
  const chat = { model: 'sim', messages: [{ role: 'user', content: 'hello' }], max_tokens: 2 }
  assert.equal((await answerOf(`http://127.0.0.1:${gateway.port}/v1/chat/completions`, chat)).status, 200)
  assert.equal(await gateway.stop(), 0) // ends by itself
  assert.match(gateway.output(), /^serving \/v1\/ on port \d+ with 2 workers\n$/)
})
