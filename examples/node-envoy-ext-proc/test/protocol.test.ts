// The endpoint-picker protocol, spoken without Envoy: what a gateway may send beside what this Envoy sends.

import assert from 'node:assert/strict'
import { once } from 'node:events'
import test, { type TestContext } from 'node:test'

import { credentials, makeClientConstructor, type ClientDuplexStream } from '@grpc/grpc-js'
import { service as healthService } from 'grpc-health-check'
import { until } from 'kvlane-example-testing'

import { canonicalEndpoint, ExternalProcessor, type ProcessingResponse } from '../src/envoy.js'
import type { ProcessingRequest } from '../src/generated/envoy/service/ext_proc/v3/ProcessingRequest.js'
import type { Value } from '../src/generated/google/protobuf/Value.js'
import { picker } from './setup.js'

const WORKERS = [
  { id: 'w1', endpoint: '127.0.0.1:8001' },
  { id: 'w2', endpoint: '127.0.0.1:8002' },
  { id: 'w3', endpoint: '[fd00::5]:8000' },
]
const DESTINATION = 'x-gateway-destination-endpoint'
const DUPLEX: ProcessingRequest = { protocolConfig: { requestBodyMode: 'FULL_DUPLEX_STREAMED', responseBodyMode: 'FULL_DUPLEX_STREAMED' } }
const POST: ProcessingRequest = { ...DUPLEX, requestHeaders: { headers: { headers: [{ key: ':method', rawValue: Buffer.from('POST') }] } } }
const body = (content: unknown, endOfStream = true): ProcessingRequest => ({ requestBody: { body: Buffer.from(JSON.stringify(content)), endOfStream } })
const text = (stringValue: string): Value => ({ stringValue })

async function connected(t: TestContext, options: Parameters<typeof picker>[2] = {}) {
  const server = await picker(t, WORKERS, options)
  const client = new ExternalProcessor(`127.0.0.1:${server.port}`, credentials.createInsecure())
  t.after(() => client.close())
  return { server, router: server.picker.router, open: () => new Conversation(client.Process()) }
}

/** One HTTP request, as Envoy would tell of it. */
class Conversation {
  replies: ProcessingResponse[] = []
  closed = false
  stream: ClientDuplexStream<ProcessingRequest, ProcessingResponse>

  constructor(stream: ClientDuplexStream<ProcessingRequest, ProcessingResponse>) {
    this.stream = stream
    stream.on('data', (reply: ProcessingResponse) => this.replies.push(reply))
    stream.on('error', () => (this.closed = true)).on('end', () => (this.closed = true))
  }

  /** Sends messages and waits for so many replies in all. */
  async say(replies: number, ...messages: ProcessingRequest[]): Promise<ProcessingResponse[]> {
    for (const message of messages) this.stream.write(message)
    await until(() => this.replies.length >= replies, () => `${this.replies.length} of ${replies} replies: ${JSON.stringify(this.replies)}`)
    return this.replies
  }
}

/** The destination in the header of a reply and in its metadata, which must be equal. */
function destinationOf(reply: ProcessingResponse | undefined): string | undefined {
  const set = (reply?.requestHeaders ?? reply?.requestBody)?.response?.headerMutation?.setHeaders
  const value = set?.find(({ header }) => header?.key === DESTINATION)?.header?.rawValue
  const named = reply?.dynamicMetadata?.fields?.['envoy.lb']?.structValue?.fields?.[DESTINATION]?.stringValue
  assert.equal(value?.toString(), named)
  return named
}

test('only the endpoints of the subset, by address and port', async (t) => {
  const { open, router } = await connected(t)
  const hint = (value: Value) => ({ ...POST, metadataContext: { filterMetadata: { 'envoy.lb.subset_hint': { fields: { [`${DESTINATION}-subset`]: value } } } } })
  const list = (...endpoints: string[]): Value => ({ listValue: { values: endpoints.map(text) } })
  for (const [subset, picked] of [
    [list('127.0.0.1:8002'), '127.0.0.1:8002'],
    [text('127.0.0.1:8002'), '127.0.0.1:8002'],
    [text('10.0.0.1:8002, 127.0.0.1:8001'), '127.0.0.1:8001'],
    [list('[FD00:0::0:5]:8000'), '[fd00::5]:8000'],
  ] as const) {
    const conversation = open()
    const [reply] = await conversation.say(2, hint(subset), body({ prompt: [1, 2, 3] }))
    assert.equal(destinationOf(reply), picked)
    conversation.stream.cancel()
  }
  for (const subset of [list(), text(''), list('127.0.0.1:8003'), list('fd00::5:8000'), list('127.0.0.1')]) {
    const conversation = open()
    const [reply] = await conversation.say(1, hint(subset), body({ prompt: [1, 2, 3] }))
    assert.equal(reply?.immediateResponse?.status?.code, 503)
    await until(() => conversation.closed)
    assert.equal(conversation.replies.length, 1)
  }
  // The same for a request without a body.
  const headers = { ...hint(list()), requestHeaders: { endOfStream: true } }
  assert.equal((await open().say(1, headers))[0]?.immediateResponse?.status?.code, 503)
  await until(() => router.stats().activeLeases === 0)
})

test('the whole conversation, in order, with a body that ends twice', async (t) => {
  const { open, router } = await connected(t)
  const conversation = open()
  const prompt = Array.from({ length: 40_000 }, (_, index) => index)
  const whole = Buffer.from(JSON.stringify({ prompt }))
  const [first, second] = [whole.subarray(0, 1_000), whole.subarray(1_000)]
  const count = 1 + Math.ceil(whole.length / 62_000)
  await conversation.say(0, POST, { requestBody: { body: first } })
  assert.equal(conversation.replies.length, 0) // nothing before the body is whole
  const replies = await conversation.say(count, { requestBody: { body: second, endOfStream: true } }, { requestBody: { endOfStream: true } })
  assert.ok(destinationOf(replies[0]))
  assert.equal(replies[0]?.requestHeaders?.response?.clearRouteCache, true)
  const pieces = replies.slice(1).map((reply) => reply.requestBody?.response?.bodyMutation?.streamedResponse)
  assert.deepEqual(Buffer.concat(pieces.map((piece) => Buffer.from(piece?.body as Buffer))), whole)
  assert.ok(pieces.every((piece) => (piece?.body?.length ?? 0) <= 62_000))
  assert.deepEqual(pieces.map((piece) => piece?.endOfStream ?? false), pieces.map((_, index) => index === pieces.length - 1))
  assert.equal(router.stats().activeLeases, 1)

  const status = { headers: { headers: [{ key: ':status', rawValue: Buffer.from('200') }] } }
  const usage = { usage: { prompt_tokens: 40_000, prompt_tokens_details: { cached_tokens: 0 } } }
  const answer = await conversation.say(count + 4, { responseHeaders: status }, { responseBody: { body: Buffer.from('data: x\n\n') } }, { responseBody: { body: Buffer.from(`data: ${JSON.stringify(usage)}\n\n`) } }, { responseTrailers: {} })
  assert.deepEqual(
    answer.slice(count).map((reply) => Object.keys(reply).find((key) => key.startsWith('response') && key !== 'response')),
    ['responseHeaders', 'responseBody', 'responseBody', 'responseTrailers'],
  )
  assert.equal(router.stats().activeLeases, 0)
  conversation.stream.end()
  await once(conversation.stream, 'end')
})

test('further choices, when the gateway understands them', async (t) => {
  const { open, router } = await connected(t, { fallbacks: 5 })
  const conversation = open()
  const [reply] = await conversation.say(2, POST, body({ prompt: [1] }))
  const named = destinationOf(reply)?.split(',') ?? []
  assert.deepEqual([...named].sort(), ['127.0.0.1:8001', '127.0.0.1:8002', '[fd00::5]:8000'])

  // Another one answers: the booking goes there.
  const busy = () => router.workers().flatMap(({ id, activeRequests }) => (activeRequests > 0 ? [id] : []))
  const ids = named.map((endpoint) => WORKERS.find((worker) => worker.endpoint === endpoint)?.id)
  assert.deepEqual(busy(), [ids[0]])
  const served = { filterMetadata: { 'envoy.lb': { fields: { [`${DESTINATION}-served`]: text(named[1] ?? '') } } } }
  await conversation.say(3, { responseHeaders: { headers: { headers: [{ key: ':status', value: '200' }] } }, metadataContext: served })
  assert.deepEqual(busy(), [ids[1]])
  conversation.stream.cancel()
  await until(() => router.stats().activeLeases === 0)
})

test('a gateway that asks after health', async (t) => {
  const { server } = await connected(t)
  const Health = makeClientConstructor(healthService, 'Health')
  const client = new Health(`127.0.0.1:${server.port}`, credentials.createInsecure())
  t.after(() => client.close())
  const check = (name: string) =>
    new Promise<string>((resolve) => client['check']?.({ service: name }, (error: Error | null, answer: { status: string }) => resolve(error ? 'error' : answer.status)))
  for (const name of ['', 'liveness', 'readiness', 'envoy.service.ext_proc.v3.ExternalProcessor']) assert.equal(await check(name), 'SERVING', name)
  assert.equal(await check('other'), 'error')
})

test('endpoints are compared in one form', () => {
  for (const [given, expected] of [
    ['127.0.0.1:80', '127.0.0.1:80'],
    ['[FD00:0::0:5]:08000', '[fd00::5]:8000'],
    ['fd00::5:8000', undefined],
    ['[127.0.0.1]:80', undefined],
    ['host:80', undefined],
    ['127.0.0.1:0', undefined],
    ['127.0.0.1:65536', undefined],
    ['127.0.0.1', undefined],
    ['', undefined],
  ] as const) assert.equal(canonicalEndpoint(given), expected, given)
  assert.rejects(async () => picker({ after: () => {} } as unknown as TestContext, [{ id: 'w1', endpoint: 'host:80' }]), /host:80 is not IP:port/)
})
