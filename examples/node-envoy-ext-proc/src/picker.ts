import { Router, type RouterOptions, type WorkerOptions } from 'kvlane'
import { Booking, Cooldown, EngineTokenizer, selectFor } from 'kvlane/gateway'

import { canonicalEndpoint } from './envoy.js'

/** An engine: its name, where it listens, and what the router may know of it. */
export interface Worker extends WorkerOptions {
  id: string
  /** `IP:port`. */
  endpoint: string
}

/** What a picker is made of. */
export interface PickerOptions {
  workers: Worker[]
  router?: RouterOptions
  /** Further endpoints to name, in order of preference (default 0). Envoy's ORIGINAL_DST clusters understand one alone. */
  fallbacks?: number
  /** Let the engines tokenize chats and texts: exact matches with their events, for a round trip (default false). */
  tokenize?: boolean
}

/** A request that has a place. */
export interface Placement {
  /** One endpoint, or several with commas between them. */
  readonly destination: string
  booking: Booking
  /** What was placed, until somebody answers. */
  request: { body: unknown; tokens: Uint32Array | undefined } | undefined
}

/** Chooses engines. One for all requests. */
export class Picker {
  readonly router: Router
  #endpoints = new Map<string, string>()
  #workers = new Map<string, string>()
  #cooldown = new Cooldown()
  #tokenizer: EngineTokenizer | undefined
  #fallbacks: number

  constructor({ workers, router, fallbacks = 0, tokenize = false }: PickerOptions) {
    this.router = new Router(router)
    this.#fallbacks = fallbacks
    for (const { id, endpoint, ...options } of workers) {
      const canonical = canonicalEndpoint(endpoint)
      if (!canonical) throw new Error(`worker ${id}: the endpoint ${endpoint} is not IP:port, such as 10.0.0.5:8000 or [fd00::5]:8000`)
      if (this.#workers.has(canonical)) throw new Error(`worker ${id}: ${canonical} is the endpoint of ${this.#workers.get(canonical)}`)
      this.router.addWorker(id, options)
      this.#endpoints.set(id, canonical)
      this.#workers.set(canonical, id)
    }
    if (tokenize) this.#tokenizer = new EngineTokenizer([...this.#workers.keys()].map((endpoint) => `http://${endpoint}`))
  }

  /** Chooses among the workers of `subset`, or among all. Nothing when none of them is there. */
  async pick(body: unknown, subset: string[] | undefined, signal: AbortSignal): Promise<Placement | undefined> {
    const named = subset ? subset.flatMap((endpoint) => this.#workers.get(endpoint) ?? []) : [...this.#endpoints.keys()]
    const tokens = await this.#tokenizer?.tokens(body, { signal })
    const lease = selectFor(this.router, body, { tokens, allowed: this.#cooldown.allowed(named) })
    if (!lease) return undefined
    const others = lease.explain().filter(({ worker }) => worker !== lease.worker)
    others.sort((one, other) => one.cost.total - other.cost.total)
    const chosen = [lease.worker, ...others.slice(0, this.#fallbacks).map(({ worker }) => worker)]
    const destination = chosen.map((worker) => this.#endpoints.get(worker)).join()
    return { destination, booking: new Booking(lease), request: { body, tokens } }
  }

  /** Takes in which status the answer has, and who gave it: after a fallback, not the one that was chosen. */
  answered(placement: Placement, status: number, served: string | undefined): void {
    const chosen = placement.booking.lease.worker
    const answering = (served && this.#workers.get(served)) || chosen
    if (answering !== chosen) {
      this.#cooldown.failed(chosen)
      placement.booking.withdraw()
      const lease = selectFor(this.router, placement.request?.body, { tokens: placement.request?.tokens, allowed: [answering] })
      if (lease) placement.booking = new Booking(lease)
    }
    placement.request = undefined
    this.#cooldown.answered(answering, status)
    placement.booking.started(status)
  }

  close(): void {
    this.router.close()
  }
}
