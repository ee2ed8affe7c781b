'use strict'

/**
 * Gives an array of token ids as a `Uint32Array`: reading numbers one by one across the border costs a hundred times more. What
 * is no token id stays as it is, so that the router says what is wrong with it.
 */
function compact(prompt) {
  if (!Array.isArray(prompt)) return prompt
  const tokens = new Uint32Array(prompt.length)
  for (let index = 0; index < tokens.length; index++) {
    const token = prompt[index]
    if (typeof token !== 'number' || token >>> 0 !== token) return prompt
    tokens[index] = token
  }
  return tokens
}

/**
 * Gives the names of `allowed` as one string with NULs between them, and the other options: one string crosses the border as fast
 * as any. Nothing when there are none, or when they are no plain names: then they stay where they are.
 */
function split(options) {
  const names = options?.allowed
  if (!Array.isArray(names) || names.length === 0) return undefined
  for (const name of names) if (typeof name !== 'string' || name.includes('\0')) return undefined
  const { allowed, ...rest } = options
  return [rest, allowed.join('\0')]
}

module.exports.split = split
module.exports.compact = compact
