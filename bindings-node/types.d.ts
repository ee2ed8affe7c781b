/* The types that Rust has no words for, then those generated from it. Make changes in types.d.ts and src. */

/** What `error.code` is on every error of this package. */
export type ErrorCode = 'config_error' | 'invalid_request' | 'unknown_worker' | 'overloaded' | 'closed'

/** An error of this package. */
export interface KvlaneError extends Error {
  code: ErrorCode
}

/** What part a worker takes in serving a request. */
export type Role = 'prefill' | 'decode' | 'both'

/** How far the events of a rank are believed. */
export type TrustState = 'unproven' | 'exact' | 'converging' | 'approximate' | 'unreachable'

/**
 * Token ids. A `Uint32Array` is read in place; a `Buffer` or `Uint8Array` holds little-endian u32; the signed arrays are
 * checked; a plain array is checked and copied.
 */
export type Tokens = Uint32Array | Uint8Array | Int32Array | BigInt64Array | number[]

/** A prompt without a tokenizer, matched with other texts alone. */
export interface TextPrompt {
  text: string
}

/** A chat without a tokenizer, as the request has it; matched with other chats alone. */
export interface ChatPrompt {
  messages: ReadonlyArray<object> | string
  tools?: ReadonlyArray<object> | null
}

/** A prompt; a string is a text. */
export type Prompt = Tokens | string | TextPrompt | ChatPrompt

/** What to wait for, and how long. */
export interface WaitOptions {
  /** Workers that must be ready (default 1). */
  workers?: number
  /** Milliseconds after which the answer is false (default: as long as it takes). */
  timeoutMs?: number
  /** Ends the wait with the signal's reason. */
  signal?: AbortSignal
}

declare global {
  interface SymbolConstructor {
    readonly dispose: unique symbol
  }
}

export interface Router {
  /**
   * Waits until so many workers are ready as `readyWorkers` counts them: true; or false when `timeoutMs` is over. The only
   * method that waits.
   */
  waitReady(options?: WaitOptions): Promise<boolean>
  /** Closes the router, at the end of a `using` block. */
  [Symbol.dispose](): void
}

/**
 * A booked request. It ends with `release`, with `Router.finish`, or when it was idle for its `ttl`; that the object is
 * collected ends nothing, so the id alone may be kept.
 */
export declare class Lease {
  private constructor()
  /** The booking's name, for `Router.finish`. */
  get id(): string
  /** The chosen worker. */
  get worker(): string
  /** The chosen rank. */
  get dpRank(): number
  /** Leading blocks that the decision counts on, confirmed by events or predicted from placements. */
  get overlapBlocks(): number
  /** Prompt tokens that the engine is expected to report as cached. */
  get predictedCachedTokens(): number
  /** Returns every candidate of the decision with every cost term, by worker and rank. */
  explain(): Array<Candidate>
  /** Says that the first token came: the prompt no longer waits for prefill. Extends the lease. */
  prefillDone(): void
  /** Says how many tokens were produced so far. Extends the lease. */
  outputTokens(tokens: number): void
  /** Releases the booking and learns from how it ended. Returns false when it had ended before: a no-op. */
  release(outcome?: FinishOptions): boolean
  /** Releases the booking if nobody has, as of a request that failed, at the end of a `using` block. */
  [Symbol.dispose](): void
}

/** One target and what placing a request there costs. */
export interface Candidate {
  /** The worker. */
  worker: string
  /** Its data-parallel rank. */
  dpRank: number
  /** Leading blocks that its events confirm. */
  overlap: Overlap
  /** Leading blocks beyond those that own placements predict. */
  predictedBlocks: number
  /** Share of predicted cached tokens that its engine confirms. */
  fidelity: number
  /** How far its events are believed. */
  trust: TrustState
  /** The cost with its terms. */
  cost: Cost
}

/** Leading blocks of a prompt that one target holds, each counted once at its best tier; those of own placements are device blocks. */
export interface TargetOverlap extends Overlap {
  /** The worker. */
  worker: string
  /** Its data-parallel rank. */
  dpRank: number
}

/** Leading blocks by tier. */
export interface Overlap {
  /** Blocks in accelerator memory. */
  device: number
  /** Blocks in host memory only. */
  host: number
  /** Blocks on local disk only. */
  disk: number
  /** Blocks in shared storage only. */
  external: number
}

/** What a placement costs, in blocks; lower is better. */
export interface Cost {
  /** `preference × (prefillWeight × (uncached + booked) + decodeBlocks + requestWeight × activeRequests)`. */
  total: number
  /** Request blocks less credited overlap. */
  uncachedPrefillBlocks: number
  /** Prefill already booked on the target, less what is of this request's own prefix. */
  bookedPrefillBlocks: number
  /** Distinct blocks active after the placement. */
  decodeBlocks: number
  /** Active requests before the placement. */
  activeRequests: number
  /** The weight of both prefill terms. */
  prefillWeight: number
  /** The weight of active requests. */
  requestWeight: number
  /** The multiplier. */
  preference: number
}
