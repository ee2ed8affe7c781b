import { Hono, type Context } from 'hono'
import { bodyLimit } from 'hono/body-limit'
import { Router, type Lease, type RouterOptions, type WorkerOptions } from 'kvlane'
import { Booking, bodyOf, Cooldown, EngineTokenizer, errorBody, selectFor } from 'kvlane/gateway'

import { Upstream, UpstreamError, type Answer } from './upstream.js'

/** An engine: its name, where it listens, and what the router may know of it. */
export interface Worker extends WorkerOptions {
  id: string
  /** Such as `http://10.0.0.5:8000`. */
  url: string
}

/** What a gateway is made of. */
export interface GatewayOptions {
  workers: Worker[]
  router?: RouterOptions
  /** Let the engines tokenize chats and texts: exact matches with their events, for a round trip (default false). */
  tokenize?: boolean
  /** Largest request body in bytes (default 32 MiB). */
  maxBody?: number
  /** Engines that a request is offered to, before the first byte of an answer (default 2). */
  attempts?: number
  /** Answers tell which engine gave them and what was expected of its cache (default false). */
  debugHeaders?: boolean
}

/** A request as it is passed on. */
interface Passed {
  path: string
  method: string
  headers: Headers
  body: Uint8Array<ArrayBuffer> | undefined
  signal: AbortSignal
}

/** An OpenAI-compatible gateway: every request below `/v1/` goes to the engine that has most of its prompt. */
export class Gateway {
  readonly router: Router
  readonly app = new Hono()
  #urls = new Map<string, string>()
  /** Workers with several data-parallel ranks. */
  #ranked = new Set<string>()
  #upstream = new Upstream()
  #cooldown = new Cooldown()
  #tokenizer: EngineTokenizer | undefined
  #attempts: number
  #debug: boolean

  constructor({ workers, router, tokenize = false, maxBody = 32 * 2 ** 20, attempts = 2, debugHeaders = false }: GatewayOptions) {
    this.router = new Router(router)
    this.#attempts = attempts
    this.#debug = debugHeaders
    for (const { id, url, ...options } of workers) {
      this.router.addWorker(id, options)
      this.#urls.set(id, originOf(id, url))
      if ((options.dpRanks ?? 1) > 1) this.#ranked.add(id)
    }
    if (tokenize) this.#tokenizer = new EngineTokenizer(this.#urls.values())
    const tooLarge = () => refusal(413, 'body_too_large', `the body is larger than ${maxBody} bytes`)
    this.app.all('/v1/*', bodyLimit({ maxSize: maxBody, onError: tooLarge }), (context) => this.#serve(context))
    this.app.notFound(() => refusal(404, 'not_found', 'there is nothing here; requests go to /v1/'))
  }

  async close(): Promise<void> {
    this.router.close()
    await this.#upstream.close()
  }

  async #serve(context: Context): Promise<Response> {
    const { raw, path, method } = context.req
    const { signal } = raw
    try {
      const bytes = new Uint8Array(await raw.arrayBuffer())
      const query = new URL(raw.url).search
      const passed = { path: path + query, method, headers: raw.headers, signal, body: bytes.length > 0 ? bytes : undefined }
      const body = bodyOf(bytes)
      return await this.#route(passed, body, await this.#tokenizer?.tokens(body, { signal }))
    } catch (error) {
      // Nobody is there to read it, but the framework wants an answer.
      if (signal.aborted) return new Response(null, { status: 499 })
      console.error('kvlane: a request failed:', error)
      return refusal(500, 'internal', 'the gateway failed; its log says why')
    }
  }

  /** Offers the request to engines, the best first, until one answers. */
  async #route(passed: Passed, body: unknown, tokens: Uint32Array | undefined): Promise<Response> {
    const left = new Set(this.#urls.keys())
    let refused: Response | undefined
    for (let attempt = 0; attempt < this.#attempts && left.size > 0; attempt++) {
      const lease = selectFor(this.router, body, { tokens, allowed: this.#cooldown.allowed(left) })
      if (!lease) break
      left.delete(lease.worker)
      await refused?.body?.cancel()
      const response = await this.#offer(passed, lease)
      if (!AGAIN.has(response.status)) return response
      refused = response
    }
    return refused ?? refusal(503, 'no_worker', 'no worker is available')
  }

  /** Offers the request to one engine. Its booking ends with the answer, however that ends. */
  async #offer(passed: Passed, lease: Lease): Promise<Response> {
    const booking = new Booking(lease)
    // A client that left before it read anything makes nobody cancel the answer.
    passed.signal.addEventListener('abort', () => booking.abandon(), { once: true })
    try {
      const dpRank = this.#ranked.has(lease.worker) ? lease.dpRank : undefined
      const answer = await this.#upstream.send(`${this.#urls.get(lease.worker)}${passed.path}`, { ...passed, dpRank })
      booking.started(answer.status)
      this.#cooldown.answered(lease.worker, answer.status)
      if (this.#debug) debug(answer.headers, lease)
      return new Response(watched(answer, booking), { status: answer.status, headers: answer.headers })
    } catch (error) {
      if (error instanceof UpstreamError && !error.sent) booking.withdraw()
      else booking.abandon()
      if (passed.signal.aborted || !(error instanceof UpstreamError)) throw error
      this.#cooldown.failed(lease.worker)
      return refusal(502, 'upstream_unreachable', `the worker could not be reached: ${error.message}`)
    }
  }
}

function originOf(worker: string, url: string): string {
  const parsed = URL.canParse(url) ? new URL(url) : undefined
  if (parsed?.protocol === 'http:' || parsed?.protocol === 'https:') return parsed.origin
  throw new Error(`worker ${worker}: the URL ${url} is not http://… or https://…`)
}

/** Statuses after which another engine may do better. Nothing of the answer has been passed on then. */
const AGAIN = new Set([429, 500, 502, 503, 504])

/** Passes an answer on, reads its usage on the way, and ends the booking with it. */
function watched({ body, first, eventStream }: Answer, booking: Booking): ReadableStream<Uint8Array> | null {
  if (!body) {
    booking.complete()
    return null
  }
  let ready = first
  return new ReadableStream<Uint8Array>({
    async pull(controller) {
      try {
        const { done, value } = ready ?? (await body.read())
        ready = undefined
        if (done) {
          booking.complete()
          controller.close()
        } else {
          booking.push(value)
          controller.enqueue(value)
        }
      } catch (error) {
        booking.abandon()
        // The client must see that the answer is not whole: in events by an event, and no [DONE].
        if (!eventStream) return controller.error(error)
        controller.enqueue(new TextEncoder().encode(`\n\ndata: ${errorBody(502, 'upstream_failed', 'the worker failed before its answer was whole')}\n\n`))
        controller.close()
      }
    },
    async cancel(reason) {
      booking.abandon()
      await body.cancel(reason)
    },
  })
}

function debug(headers: Headers, lease: Lease): void {
  headers.set('x-kvlane-worker', lease.worker)
  headers.set('x-kvlane-overlap-blocks', String(lease.overlapBlocks))
}

/** An answer of our own, in the shape of OpenAI's errors. */
function refusal(status: number, code: string, message: string): Response {
  return new Response(errorBody(status, code, message), { status, headers: { 'content-type': 'application/json' } })
}
