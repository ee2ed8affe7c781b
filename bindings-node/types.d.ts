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
 * checked; a plain array is read number by number, which is a hundred times slower.
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

export interface Lease {
  /** Releases the booking if nobody has, as of a request that failed, at the end of a `using` block. */
  [Symbol.dispose](): void
}

