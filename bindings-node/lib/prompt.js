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

module.exports.compact = compact
