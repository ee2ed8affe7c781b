'use strict'

// Runs what the documentation shows.

const assert = require('node:assert/strict')
const { execFile } = require('node:child_process')
const { mkdtempSync, readFileSync, rmSync, symlinkSync, mkdirSync, writeFileSync } = require('node:fs')
const { tmpdir } = require('node:os')
const { join } = require('node:path')
const { promisify } = require('node:util')
const test = require('node:test')

const { errorCodes } = require('..')

const GUIDE = readFileSync(join(__dirname, '../../docs/node.md'), 'utf8')
const README = readFileSync(join(__dirname, '../../README.md'), 'utf8')
const SECTIONS = `${GUIDE}\n${README}`.split(/^## /m).slice(1)

/** What the example of a section prints. */
const PRINTS = {
  'Ten lines': /^w[12] holds 0 blocks\ntrue\n$/,
  'Engine events': /^false (unproven|unreachable)\n$/,
  Leases: /^0\n$/,
  Gateways: /^\{"usage": \{"prompt_tokens": 3\}\} 0\n$/,
  Errors: /^config_error blokSize\n$/,
  'As a library': /^w[12] holds 0 blocks\n$/,
}

test('every example of the guide and of the README runs', async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'kvlane-docs-'))
  t.after(() => rmSync(folder, { recursive: true }))
  mkdirSync(join(folder, 'node_modules'))
  symlinkSync(join(__dirname, '..'), join(folder, 'node_modules/kvlane'), 'junction')
  const shown = new Map(SECTIONS.map((section) => [section.split('\n')[0], section.match(/```js\n([\s\S]*?)```/)?.[1]]))
  const examples = [...shown].filter(([, code]) => code)
  assert.deepEqual(examples.map(([name]) => name), Object.keys(PRINTS))
  for (const [name, code] of examples) {
    const file = join(folder, 'example.mjs')
    writeFileSync(file, code)
    const { stdout } = await promisify(execFile)(process.execPath, [file], { timeout: 20_000 })
    assert.match(stdout, PRINTS[name], name)
  }
})

test('the table of costs is that of the last measurement', () => {
  const { results } = require('../bench/results.json')
  const rows = [...GUIDE.matchAll(/^\| (.*) \| ([\d.]+) \| ([\d.]+) \|$/gm)].map(([, ...cells]) => cells)
  assert.deepEqual(rows, results.map(({ call, p50, p99 }) => [call, p50.toFixed(1), p99.toFixed(1)]))
})

test('the guide tells of every code', () => {
  const told = [...GUIDE.matchAll(/^\| `(\w+)` \|/gm)].map((match) => match[1])
  assert.deepEqual(told.filter((word) => word.includes('_') || errorCodes().includes(word)), errorCodes())
})
