'use strict'

const native = require('../native.js')

const STATES = native.trustStates()

/** Numbers of a candidate, in the order of `numbers` in src/report.rs. */
const NUMBERS = 16

/** Makes objects of candidates, which come as one array of numbers: objects cost less here than across the border. */
function candidatesOf([workers, numbers]) {
  return workers.map((worker, index) => {
    const at = index * NUMBERS
    return {
      worker,
      dpRank: numbers[at],
      overlap: { device: numbers[at + 1], host: numbers[at + 2], disk: numbers[at + 3], external: numbers[at + 4] },
      predictedBlocks: numbers[at + 5],
      fidelity: numbers[at + 6],
      trust: STATES[numbers[at + 7]],
      cost: {
        total: numbers[at + 8],
        uncachedPrefillBlocks: numbers[at + 9],
        bookedPrefillBlocks: numbers[at + 10],
        decodeBlocks: numbers[at + 11],
        activeRequests: numbers[at + 12],
        prefillWeight: numbers[at + 13],
        requestWeight: numbers[at + 14],
        preference: numbers[at + 15],
      },
    }
  })
}

/** The same for overlaps. */
function overlapsOf([workers, numbers]) {
  return workers.map((worker, index) => {
    const [dpRank, device, host, disk, external] = numbers.subarray(index * 5, index * 5 + 5)
    return { worker, dpRank, device, host, disk, external }
  })
}

module.exports.overlapsOf = overlapsOf
module.exports.candidatesOf = candidatesOf
