import { bodyOf } from 'kvlane/gateway'

import {
  destination,
  header,
  pieces,
  refusal,
  servedBy,
  subsetOf,
  type BodySendMode__Output as BodyMode,
  type ProcessingRequest__Output as Message,
  type ProcessingResponse as Reply,
} from './envoy.js'
import type { Picker, Placement } from './picker.js'

/**
 * One HTTP request on its way through Envoy: what Envoy tells of it goes in, what Envoy shall do comes out.
 *
 * In full-duplex mode nothing is answered until the body is whole, then all of it: the headers with the destination, the body
 * as it came, the trailers. In buffered mode Envoy holds the headers and waits for an answer to each message. In every other
 * mode the headers leave before the body is seen, so the request is placed by load alone.
 */
export class Exchange {
  #picker: Picker
  #maxBody: number
  #signal: AbortSignal
  #modes: { request: BodyMode; response: BodyMode } = { request: 'FULL_DUPLEX_STREAMED', response: 'FULL_DUPLEX_STREAMED' }
  #subset: string[] | undefined
  #body: Buffer[] = []
  #size = 0
  /** The request has been answered, or need not be. */
  #placed = false
  #placement: Placement | undefined
  #readable = true
  /** A refusal was sent: the stream may be closed, nothing else is to be said. */
  over = false

  constructor(picker: Picker, { maxBody, signal }: { maxBody: number; signal: AbortSignal }) {
    this.#picker = picker
    this.#maxBody = maxBody
    this.#signal = signal
  }

  /** Takes a message in and returns the answers, in order. */
  async receive(message: Message): Promise<Reply[]> {
    if (message.protocolConfig) {
      const { requestBodyMode = 'NONE', responseBodyMode = 'NONE' } = message.protocolConfig
      this.#modes = { request: requestBodyMode, response: responseBodyMode }
    }
    if (this.over) return []
    if (message.requestHeaders) return this.#requestHeaders(message)
    if (message.requestBody) return this.#requestBody(message.requestBody)
    if (message.requestTrailers) return this.#requestTrailers()
    if (message.responseHeaders) return this.#responseHeaders(message)
    if (message.responseBody) return this.#responseBody(message.responseBody)
    if (message.responseTrailers) {
      this.#placement?.booking.complete()
      return [{ responseTrailers: {} }]
    }
    return [] // something newer than this
  }

  /** The stream has ended, however. */
  end(): void {
    this.#placement?.booking.abandon()
  }

  async #requestHeaders({ requestHeaders, metadataContext }: Message): Promise<Reply[]> {
    this.#subset = subsetOf(metadataContext)
    const length = Number(header(requestHeaders?.headers, 'content-length') ?? 0)
    if (length > this.#maxBody) return this.#tooLarge()
    if (!requestHeaders?.endOfStream) {
      if (this.#modes.request === 'FULL_DUPLEX_STREAMED') return []
      if (this.#modes.request === 'BUFFERED') return [{ requestHeaders: {} }]
    }
    return this.#place((to) => [{ requestHeaders: { response: to.response }, dynamicMetadata: to.metadata }])
  }

  async #requestBody({ body = Buffer.alloc(0), endOfStream = false }: NonNullable<Message['requestBody']>): Promise<Reply[]> {
    const duplex = this.#modes.request === 'FULL_DUPLEX_STREAMED'
    // In full-duplex mode Envoy may say twice that the body has ended; in others the body needs no answer but consent.
    if (this.#placed) return duplex ? [] : [{ requestBody: {} }]
    this.#size += body.length
    if (this.#size > this.#maxBody) return this.#tooLarge()
    this.#body.push(body)
    if (duplex) return endOfStream ? this.#passOn(true) : []
    return this.#place((to) => [{ requestBody: { response: to.response }, dynamicMetadata: to.metadata }])
  }

  async #requestTrailers(): Promise<Reply[]> {
    const trailers = { requestTrailers: {} }
    if (this.#placed || this.#modes.request !== 'FULL_DUPLEX_STREAMED') return [trailers]
    const replies = await this.#passOn(false)
    return this.over ? replies : [...replies, trailers]
  }

  /** Places the request and passes the whole body on. */
  #passOn(last: boolean): Promise<Reply[]> {
    const body = Buffer.concat(this.#body)
    return this.#place((to) => [
      { requestHeaders: { response: to.response }, dynamicMetadata: to.metadata },
      ...pieces(body, last).map((piece): Reply => ({ requestBody: { response: { bodyMutation: { streamedResponse: piece } } } })),
    ])
  }

  async #place(send: (to: Destination) => Reply[]): Promise<Reply[]> {
    const body = this.#body.length > 0 ? bodyOf(Buffer.concat(this.#body)) : undefined
    this.#body = []
    this.#placed = true
    this.#placement = await this.#picker.pick(body, this.#subset, this.#signal)
    if (!this.#placement) {
      const among = this.#subset ? `among the ${this.#subset.length} endpoints that the gateway allows` : 'at all'
      return this.#refuse(refusal(503, 'no_worker', `no worker is available ${among}`))
    }
    const { mutation, metadata } = destination(this.#placement.destination)
    // Otherwise a route stays that was chosen before the header was there.
    return send({ response: { headerMutation: mutation, clearRouteCache: true }, metadata })
  }

  #responseHeaders({ responseHeaders, metadataContext }: Message): Reply[] {
    const headers = responseHeaders?.headers
    if (this.#placement) {
      this.#picker.answered(this.#placement, Number(header(headers, ':status') ?? 0), servedBy(metadataContext))
      this.#readable = (header(headers, 'content-encoding') ?? 'identity') === 'identity'
      if (responseHeaders?.endOfStream) this.#placement.booking.complete()
    }
    return [{ responseHeaders: {} }]
  }

  #responseBody({ body = Buffer.alloc(0), endOfStream = false }: NonNullable<Message['responseBody']>): Reply[] {
    if (this.#readable) this.#placement?.booking.push(body)
    if (endOfStream) this.#placement?.booking.complete()
    if (this.#modes.response !== 'FULL_DUPLEX_STREAMED') return [{ responseBody: {} }]
    return pieces(body, endOfStream).map((piece) => ({ responseBody: { response: { bodyMutation: { streamedResponse: piece } } } }))
  }

  #tooLarge(): Reply[] {
    return this.#refuse(refusal(413, 'body_too_large', `the body is larger than ${this.#maxBody} bytes`))
  }

  #refuse(reply: Reply): Reply[] {
    this.over = true
    this.#body = []
    return [reply]
  }
}

interface Destination {
  response: NonNullable<NonNullable<Reply['requestHeaders']>['response']>
  metadata: NonNullable<Reply['dynamicMetadata']>
}
