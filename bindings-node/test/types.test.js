'use strict'

const { execFile } = require('node:child_process')
const { join } = require('node:path')
const { promisify } = require('node:util')
const test = require('node:test')

test('the declarations fit their use, strictly', async () => {
  const tsc = require.resolve('typescript/bin/tsc')
  try {
    await promisify(execFile)(process.execPath, [tsc, '-p', join(__dirname, 'tsconfig.json')])
  } catch (error) {
    throw new Error(error.stdout)
  }
})
