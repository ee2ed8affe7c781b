// However a request ends, its booking ends with it: what holds of every gateway.

import assert from 'node:assert/strict'
import { createServer, request } from 'node:http'
import { connect, type AddressInfo } from 'node:net'
import test, { type TestContext } from 'node:test'

import type { Router, RouterOptions } from 'kvlane'

import type { Engine } from './engine.js'
import { openAnswer } from './stream.js'
import { until } from './until.js'
import { answerOf, chatWorkload, play, tokenWorkload } from './workload.js'

/** A gateway before two engines. */
export interface Subject {
  url: string
  engines: Engine[]
  router: Router
  /** Stops it, and lets open requests finish for so long. */
  stop(graceMs?: number): Promise<void>
}

/** How it is started: the speed and the model of the engines, whether they tokenize, how the router is made. */
export interface SubjectOptions {
  speed?: number
  model?: string
  tokenize?: boolean
  router?: RouterOptions
}

/** Starts a gateway that ends with the test. */
export type Start = (t: TestContext, options?: SubjectOptions) => Promise<Subject>

const CHAT = { model: 'sim', messages: [{ role: 'user', content: 'one two three' }], max_tokens: 4 }
/** Forty seconds of answer at speed 1. */
const LONG = { ...CHAT, stream: true, max_tokens: 8_000 }

/** Declares the tests of the shared-prefix workload: at least 58 of 60 repeats hit. */
export function testWorkload(start: Start): void {
  for (const [name, sends, path, tokenize] of [
    ['token ids find their prefix, by events', tokenWorkload(1), '/v1/completions', false],
    ['chats find their prefix without a tokenizer', chatWorkload(1), '/v1/chat/completions', false],
    ['chats find their prefix with the tokenizer of the engines, by events', chatWorkload(1), '/v1/chat/completions', true],
  ] as const) {
    test(name, async (t) => {
      const { url, router } = await start(t, { tokenize })
      const { hits, repeats } = await play(sends, path, () => url)
      t.diagnostic(`${hits} of ${repeats} repeats hit`)
      assert.equal(repeats, 60)
      assert.ok(hits >= 58, `${hits} of 60`)
      await until(() => leases(router) === 0)
      if (path === '/v1/completions' || tokenize) {
        const { fidelity, state } = router.trust('w1')
        assert.deepEqual({ fidelity, state }, { fidelity: 1, state: 'exact' })
      }
    })
  }
}

/** Declares the tests of the endings. */
export function testEndings(start: Start): void {
  test('an answer that was read to its end', async (t) => {
    const { url, router } = await start(t)
    for (const stream of [false, true]) {
      const { status, text } = await answerOf(`${url}/v1/chat/completions`, { ...CHAT, stream })
      assert.equal(status, 200)
      assert.match(text, stream ? /\n\ndata: \[DONE\]\n\n$/ : /"finish_reason":"length"/)
      await until(() => leases(router) === 0)
    }
    assert.equal(router.stats().decisions, 2)
  })

  test('a request without a body, and one whose body nobody understands', async (t) => {
    const { url, router } = await start(t)
    const models = await fetch(`${url}/v1/models`)
    assert.equal(models.status, 200)
    assert.match(await models.text(), /"id":"sim"/)
    for (const body of ['', 'no JSON', '[1]', '{"messages": 7}', { ...CHAT, messages: [{ role: 7 }] }, { model: 'sim', prompt: [1, -5], max_tokens: 1 }]) {
      const { status, text } = await answerOf(`${url}/v1/chat/completions`, body)
      assert.equal(status, 400, text)
      assert.match(text, /"error":/) // the engine's own words
    }
    await until(() => leases(router) === 0)
  })

  test('a request that the engine refuses', async (t) => {
    const { url, router } = await start(t)
    const { status, text } = await answerOf(`${url}/v1/chat/completions`, { ...CHAT, model: 'other' })
    assert.equal(status, 404)
    assert.match(text, /The model `other` does not exist/)
    await until(() => leases(router) === 0)
  })

  test('an engine that dies in the middle of its answer', async (t) => {
    const { url, router, engines } = await start(t, { speed: 1 })
    const answer = await openAnswer(`${url}/v1/chat/completions`, LONG)
    assert.equal(leases(router), 1)
    const [busy] = router.workers().filter(({ activeRequests }) => activeRequests > 0)
    await engines.find(({ id }) => id === busy?.id)?.stop('SIGKILL')
    // The client sees that it is not whole.
    assert.ok(!(await answer.ended) || answer.text().includes('"code":"upstream_failed"'), answer.text().slice(-200))
    assert.doesNotMatch(answer.text(), /\[DONE\]/)
    await until(() => leases(router) === 0)
  })

  test('a client that leaves in the middle of its answer', async (t) => {
    const { url, router, engines } = await start(t, { speed: 1 })
    const answer = await openAnswer(`${url}/v1/chat/completions`, LONG)
    assert.equal(leases(router), 1)
    answer.request.destroy()
    await until(() => leases(router) === 0)
    await until(async () => {
      const running = await Promise.all(engines.map((engine) => engine.gauge('vllm:num_requests_running')))
      return running.every((count) => count === 0)
    })
  })

  test('a client that leaves before its answer begins', async (t) => {
    const { url, router } = await start(t, { speed: 0.01 })
    const sent = request(`${url}/v1/chat/completions`, { method: 'POST' }).on('error', () => {})
    sent.end(JSON.stringify(LONG))
    await until(() => leases(router) === 1)
    sent.destroy()
    await until(() => leases(router) === 0)
  })

  test('a client that leaves while it sends', async (t) => {
    const { url, router } = await start(t)
    const pause = () => new Promise((resolve) => setTimeout(resolve, 100))
    for (const body of ['', '{"model": "sim"']) {
      const sent = connect(Number(new URL(url).port), '127.0.0.1')
      sent.write(`POST /v1/chat/completions HTTP/1.1\r\nhost: kvlane\r\ncontent-length: 1000\r\n\r\n${body}`)
      await pause()
      sent.destroy()
      await pause()
    }
    assert.equal(leases(router), 0)
    assert.equal(router.stats().decisions, 0)
  })

  test('a client that stays and reads nothing', async (t) => {
    // Events of 10 KB each: more than all buffers on the way hold.
    const model = 'm'.repeat(10_000)
    const { url, router } = await start(t, { model, router: { leaseSeconds: 1 } })
    const answer = await openAnswer(`${url}/v1/chat/completions`, { ...LONG, model })
    answer.response.pause()
    assert.equal(leases(router), 1)
    await until(() => leases(router) === 0) // its time is over
    assert.equal(answer.response.complete, false)
    answer.request.destroy()
  })

  test('many at once, half of which leave', async (t) => {
    const { url, router } = await start(t, { speed: 1 })
    const ask = (index: number) => openAnswer(`${url}/v1/chat/completions`, index % 2 ? LONG : { ...LONG, max_tokens: 100 })
    const answers = await Promise.all(Array.from({ length: 32 }, (_, index) => ask(index)))
    const busy = router.workers().map(({ activeRequests }) => activeRequests)
    assert.ok(Math.min(...busy) > 0, busy.join())
    answers.forEach((answer, index) => index % 2 && answer.request.destroy())
    const ends = await Promise.all(answers.map((answer) => answer.ended))
    assert.deepEqual(ends, answers.map((_, index) => index % 2 === 0))
    await until(() => leases(router) === 0)
  })

  test('the gateway is stopped while an answer is on its way', async (t) => {
    const { url, stop } = await start(t, { speed: 1 })
    const answer = await openAnswer(`${url}/v1/chat/completions`, { ...LONG, max_tokens: 100 })
    const stopped = stop(10_000)
    assert.equal(await answer.ended, true)
    assert.match(answer.text(), /\[DONE\]/)
    await stopped
  })
}

/** Declares the test of what is learned from answers; `start` puts a gateway before one worker. */
export function testAudit(start: (t: TestContext, url: string) => Promise<{ url: string; router: Router }>): void {
  test('an engine that finds less in its cache than it should is believed less', async (t) => {
    const usage = JSON.stringify({ prompt_tokens: 1_600, completion_tokens: 1, prompt_tokens_details: { cached_tokens: 0 } })
    const engine = createServer((request, response) => {
      const stream = request.url === '/v1/stream'
      response.writeHead(200, { 'content-type': stream ? 'text/event-stream' : 'application/json' })
      response.write(stream ? 'data: {"choices": []}\n\ndata: {"usa' : '{"usa')
      setTimeout(() => response.end(`ge": ${usage}}${stream ? '\n\ndata: [DONE]\n\n' : ''}`), 5)
    })
    await new Promise<void>((resolve) => engine.listen(0, '127.0.0.1', resolve))
    t.after(() => new Promise((resolve) => engine.close(resolve).closeAllConnections()))
    const { url, router } = await start(t, `http://127.0.0.1:${(engine.address() as AddressInfo).port}`)
    const body = { model: 'sim', prompt: Array.from({ length: 1_600 }, (_, index) => index) }
    for (const path of ['/v1/stream', '/v1/whole']) {
      const before = router.trust('w1').fidelity
      for (let sent = 0; sent < 8; sent++) await answerOf(`${url}${path}`, body)
      await until(() => leases(router) === 0)
      const after = router.trust('w1').fidelity
      assert.ok(after < before, `${after} after ${before}`)
    }
  })
}

function leases(router: Router): number {
  return router.stats().activeLeases
}
